"""`moco eval detect`: how well a detector learns from a run's backbone, beside random and supervised weights.

marked pictures with objects    coco, voc, opening files to those    outlines masks    batches what a step learns from
network the detector    training the loop    scoring average precision    starts, job, table the comparison
"""

from moco.detection.job import detect
from moco.detection.table import Detection

__all__ = ["Detection", "detect"]

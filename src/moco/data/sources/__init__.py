"""Where pictures come from: whatever holds them, all of it random access: `source[i] → Sample`.

base      what all sources share             folder    image files, one by one; several sources as one
labels    what can be done with labels       listing   lists of paths
array     pictures in one array              objects   Python sequences and torch data sets
shards    tar shards and their index         tar       the headers of a tar file
tables    Parquet files                      huggingface   data sets of Hugging Face
ranges    bytes from the middle of a file    cache     what is kept on disk
opening   the front door
"""

from moco.data.sources.array import ArraySource
from moco.data.sources.base import EXTENSIONS, PackedNames, Sample, Source
from moco.data.sources.folder import FolderSource
from moco.data.sources.labels import check_labels
from moco.data.sources.opening import open_source

__all__ = [
    "EXTENSIONS",
    "ArraySource",
    "FolderSource",
    "PackedNames",
    "Sample",
    "Source",
    "check_labels",
    "open_source",
]

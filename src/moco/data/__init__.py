"""From bytes to views: sources, decoding, random views, batches. Knows no model."""

"""Weights from elsewhere and for elsewhere: reading foreign files, importing runs, exporting encoders."""

"""The pictures of the notebooks: functions from arrays to a matplotlib Figure, one module for each part of the book."""

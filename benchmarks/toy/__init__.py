"""The toy study of unit credit: tasks small enough to enumerate, credit by the library's own functions, learning curves."""

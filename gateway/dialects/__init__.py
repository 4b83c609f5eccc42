"""HTTP dialects: how a client's request is read and how answers and errors are written in its own terms."""

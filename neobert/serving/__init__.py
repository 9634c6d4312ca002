"""HTTP server for sentence encoders, rerankers and classifiers."""

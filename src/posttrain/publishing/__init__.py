"""Publish a trained model: model cards, exports, uploads and a server."""

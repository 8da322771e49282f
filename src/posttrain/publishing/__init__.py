"""Hand a trained model on: model cards, exports, uploads and a server."""

"""A device that drafts by onnxruntime: export of its bundle, and drafting without PyTorch."""

"""Export of Hub folders to other engines: `neobert export gguf|onnx|openvino` (docs/serving.md)."""

"""Hub folder to other engines: `neobert export gguf | onnx | openvino`; see docs/serving.md."""

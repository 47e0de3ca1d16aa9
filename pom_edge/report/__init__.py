"""``pom-edge report``: a bundle as one HTML page. Needs no torch and no onnx; figures need matplotlib."""

"""Records in tools that show numbers over time: TensorBoard, MLflow, and those of other packages."""

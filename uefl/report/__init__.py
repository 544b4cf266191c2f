"""Read run folders, and write their tables, pictures, pages and TensorBoard events."""

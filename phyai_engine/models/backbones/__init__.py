"""Networks shared by several model families."""

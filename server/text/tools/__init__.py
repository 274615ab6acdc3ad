"""Tool calls: dialects by which models write them, one small file each; see `dialect.ToolDialect`."""

"""What `tools/check_layouts.py` does: layouts, models, the ranks that check them, the table."""

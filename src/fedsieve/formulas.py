"""What a spreadsheet would take for a formula."""

FORMULA_STARTS = tuple("=+-@\t\r\n＝＋－＠")
"""What a spreadsheet may take for the start of a formula, full-width forms included."""
ESCAPED_STARTS = ("'", "\ufeff", *FORMULA_STARTS)
"""What gets an apostrophe before it: a byte order mark too, since it would be lost at the start of
a file."""

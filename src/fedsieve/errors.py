"""Errors that a person can cause; the command line prints their one sentence, no traceback."""


class FedsieveError(Exception):
    """Something the user can put right; its text is one sentence that says what to do."""


def check(ok: bool, sentence: str) -> None:
    """Raise a `FedsieveError` with `sentence` unless `ok`."""
    if not ok:
        raise FedsieveError(sentence)

from hypothesis import given
from hypothesis import strategies as st

from segcredit.report.responses import split_text


def test_words_keep_the_blanks_before_them_and_line_ends_stand_alone():
    assert split_text("So  x = 2.\n\n Then\r\ny ") == [
        *["So", "  x", " =", " 2.", "\n", "\n", " Then", "\r\n", "y", " "]
    ]


@given(st.text(st.characters() | st.sampled_from(" \t\r\n\x0b\x1c\u2028\u3000ab")))
def test_pieces_join_to_the_text(text):
    pieces = split_text(text)
    assert "".join(pieces) == text
    assert all(pieces)
    assert all("\n" not in piece[:-1] for piece in pieces)

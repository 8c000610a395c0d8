"""The patch applier: exact or not at all, and it says where."""

from __future__ import annotations

import pytest

import strict_patch
from strict_patch import PatchError

SOURCE = b"".join(b"line %d\n" % i for i in range(1, 21))

GIT_PATCH = b"""\
Adds two lines and changes one.

diff --git a/src/x.c b/src/x.c
index 0000000..1111111 100644
--- a/src/x.c
+++ b/src/x.c
@@ -2,3 +2,5 @@ some function
 line 2
+new a
+new b
 line 3
 line 4
@@ -10,3 +12,3 @@
 line 10
-line 11
+line eleven
 line 12
"""


def apply_text(patch: bytes, source: bytes | None = SOURCE) -> bytes:
    (file,) = strict_patch.parse(patch, "p.patch")
    return strict_patch.apply(source, file, "p.patch")


def test_applies_hunks_and_counts_added_lines() -> None:
    (file,) = strict_patch.parse(GIT_PATCH, "p.patch")
    assert (file.path, file.creates, file.added, len(file.hunks)) == ("src/x.c", False, 3, 2)
    lines = strict_patch.apply(SOURCE, file, "p.patch").splitlines()
    assert lines[1:5] == [b"line 2", b"new a", b"new b", b"line 3"]
    assert lines[12] == b"line eleven"
    assert len(lines) == 22


def test_several_files_and_a_new_one() -> None:
    patch = GIT_PATCH + b"--- /dev/null\n+++ b/src/new.h\n@@ -0,0 +1,2 @@\n+one\n+two\n"
    changed, created = strict_patch.parse(patch, "p.patch")
    assert (changed.path, created.path, created.creates) == ("src/x.c", "src/new.h", True)
    assert strict_patch.apply(None, created, "p.patch") == b"one\ntwo\n"
    with pytest.raises(PatchError, match=r"creates src/new\.h, which exists already"):
        strict_patch.apply(b"", created, "p.patch")


def test_insertion_without_context_and_missing_final_newline() -> None:
    insertion = b"--- a/x\n+++ b/x\n@@ -2,0 +3 @@\n+between\n"
    assert apply_text(insertion, b"1\n2\n3\n") == b"1\n2\nbetween\n3\n"
    end = b"--- a/x\n+++ b/x\n@@ -1 +1,2 @@\n-1\n\\ No newline at end of file\n+1\n+2\n"
    assert apply_text(end, b"1") == b"1\n2\n"
    kept = b"--- a/x\n+++ b/x\n@@ -1 +1,2 @@\n+0\n 1\n\\ No newline at end of file\n"
    assert apply_text(kept, b"1") == b"0\n1"


def test_a_changed_line_names_file_hunk_and_line() -> None:
    with pytest.raises(PatchError) as caught:
        apply_text(GIT_PATCH, SOURCE.replace(b"line 11\n", b"line XI\n"))
    assert str(caught.value) == (
        "p.patch: hunk 2 (@@ -10,3 +12,3 @@) does not apply to src/x.c at line 11\n"
        "  the patch expects: line 11\n"
        "  the file has:      line XI"
    )


def test_moved_lines_are_not_accepted_but_found() -> None:
    with pytest.raises(PatchError, match=r"hunk 1 .*\n.*\n.*\n.*at line 3: refresh the patch"):
        apply_text(GIT_PATCH, b"inserted\n" + SOURCE)


def test_an_applied_patch_does_not_apply_again() -> None:
    with pytest.raises(PatchError, match="hunk 1 "):
        apply_text(GIT_PATCH, apply_text(GIT_PATCH))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"@@ -2,3 +2,5 @@", b"@@ -2,3 +2,6 @@", "is longer than it says|is shorter than it says"),
        (b"@@ -2,3 +2,5 @@", b"@@ -2,3 +2,4 @@", "is longer than it says|outside a hunk"),
        (b" line 12\n", b"", "is shorter than it says"),
        (b" line 12\n", b" line 12\n line 13\n", "line outside a hunk"),
        (b"+++ b/src/x.c", b"+++ /dev/null", "deleting a file is not supported"),
        (b"b/src/x.c\n@@", b"b/../x.c\n@@", "unsafe path"),
        (b"+++ b/src/x.c", b"+++ b/src/y.c", "are not one file"),
        (b"index 0000000", b"rename from src/z.c\nindex 0000000", "not supported: rename from"),
        (b"index 0000000", b"GIT binary patch\nindex 0000000", "not supported: GIT binary patch"),
        (b"--- a/src/x.c\n+++ b/src/x.c\n", b"", "hunk without a file header"),
    ],
)
def test_malformed_patches_are_refused(old: bytes, new: bytes, message: str) -> None:
    assert old in GIT_PATCH
    with pytest.raises(PatchError, match=message):
        strict_patch.parse(GIT_PATCH.replace(old, new), "p.patch")


def test_text_without_a_diff_is_refused() -> None:
    with pytest.raises(PatchError, match="no file header"):
        strict_patch.parse(b"just words\n", "p.patch")


def test_hunks_out_of_order_and_past_the_end_are_refused() -> None:
    twice = b"--- a/x\n+++ b/x\n@@ -2 +2 @@\n-2\n+b\n@@ -1 +1 @@\n-1\n+a\n"
    with pytest.raises(PatchError, match=r"hunk 2 .* overlaps the hunk before it"):
        apply_text(twice, b"1\n2\n")
    with pytest.raises(PatchError, match=r"hunk 1 .* at line 9"):
        apply_text(b"--- a/x\n+++ b/x\n@@ -9 +9 @@\n-9\n+b\n", b"1\n2\n")
    with pytest.raises(PatchError, match="the file has only 2 lines"):
        apply_text(b"--- a/x\n+++ b/x\n@@ -9,0 +9 @@\n+b\n", b"1\n2\n")
    with pytest.raises(PatchError, match="which does not exist"):
        apply_text(GIT_PATCH, None)

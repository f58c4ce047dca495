"""Section "Explorer": the negatives of an anchor under any setting, by the encoder of each group."""

from hardneg.insight.contents import Contents, Part, isolated
from hardneg.insight.explorer.section import HINT, section


def explorer(contents: Contents) -> Part:
    """The explorer with up to 1,000 samples, or the reason why there is none."""
    if isinstance(contents.explored, str):
        return Part("explorer", "Explorer", HINT, f'<p class="note">{isolated(contents.explored)}</p>')
    return section(contents.explored)

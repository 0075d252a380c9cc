"""The tables of families in the documentation are what the code says."""

import re

import pytest

from mlxft.models.decoder import unchecked_view
from mlxft.models.families.whole import PADDED_ONLY
from tests.docs.pages import ROOT
from tests.tiny_models import FAMILIES, MORE_FAMILIES, model_config, random_model

TEXT = (ROOT / "docs/adding-a-family.md").read_text(encoding="utf-8")
IN_PARTS = dict(re.findall(r"^\| `(\w+)` \| ((?:yes|no) \| (?:yes|no)) \|$", TEXT, re.MULTILINE))
PADDED = dict(re.findall(r"^\| `(\w+)` \| ((?:their|positions) .+) \|$", TEXT, re.MULTILINE))


def test_every_family_that_is_tested_is_in_a_table_and_no_other():
    assert IN_PARTS.keys() == (FAMILIES | MORE_FAMILIES).keys()
    assert PADDED == PADDED_ONLY


@pytest.mark.parametrize("family", FAMILIES | MORE_FAMILIES)
def test_windows_and_states_are_as_the_table_says(family):
    made = unchecked_view(random_model(model_config(family)))
    said = " | ".join("yes" if any(found) else "no" for found in (made.windows(), made.recurrent()))
    assert IN_PARTS[family] == said

"""The verdicts as text and as JSON that any program reads."""

import json

import pandas as pd
import pytest

from mxfp4 import cli
from mxfp4.analysis.registered_study.contrasts import judge
from mxfp4.analysis.registered_study.tables import COLUMNS
from mxfp4.analysis.registered_study.text import claims_json, claims_text
from mxfp4.studies.registry import load_study

STUDY = load_study()
VERDICTS = judge(STUDY, pd.DataFrame(columns=COLUMNS))


def test_every_claim_stands_under_its_question_with_its_registration():
    text = claims_text(VERDICTS)
    assert all(f" {claim.id} (" in text for claim in STUDY.claims)
    assert text.count("registered") >= len(STUDY.claims)
    assert text.endswith(f"{len(STUDY.claims)} claims: {len(STUDY.claims)} not run")


def test_the_json_has_no_number_that_json_lacks():
    rows = json.loads(json.dumps(claims_json(VERDICTS), allow_nan=False))
    assert [row["id"] for row in rows] == [claim.id for claim in STUDY.claims]
    assert {row["value"] for row in rows} == {None}


@pytest.mark.parametrize("other", [["--scale", "gpu"], ["--ledger", "x.yml"], ["--id", "nope"]])
def test_what_does_not_go_with_the_study_is_refused(other, capsys):
    assert cli.main(["claims", "--study", *other]) == 1
    assert capsys.readouterr().err.startswith("error: ")

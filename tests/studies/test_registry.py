"""The registered study: the book's own, the checks of its file, and the commits of its claims."""

import copy
import subprocess

import pytest
import yaml

from mxfp4.errors import UserError
from mxfp4.layers.recipe import recipe
from mxfp4.studies.registry import (
    BUDGETS,
    Contrast,
    Factorial,
    changed_after,
    claim_texts,
    load_study,
    registrations,
    study_path,
)

STUDY = load_study()
DATA = yaml.safe_load(study_path().read_text())


def test_the_six_primary_claims_are_those_of_the_protocol():
    primaries = {(c.contrast.arm, c.contrast.reference, c.holds.kind, c.holds.bound) for c in STUDY.primaries}
    assert primaries == {
        ("mxfp4+h16", "mxfp4", "below", 0),
        ("mxfp4", "mxfp4-fprop-dgrad", "above", 0),
        ("mxfp4+sr", "mxfp4", "above", 0),
        ("mxfp4+sr-grad", "mxfp4", "below", 0),
        ("ti2d", "ti2d-no-2d", "below", 0),
        ("ti2d", "bf16", "below", 0.013),
    }
    for c in STUDY.primaries:
        assert (c.runs, c.contrast.outcome, c.contrast.budget, STUDY.seeds(c)) == ("main", "own", "full", 6)


def test_every_question_has_a_claim_and_every_word_is_plain():
    assert {c.question for c in STUDY.claims} == set(STUDY.questions)
    for c in STUDY.claims:
        assert c.claim.endswith(".") and c.fails_when.endswith(".") and len(c.claim.split()) <= 26, c.id
        assert "refute" not in f"{c.claim} {c.fails_when}"


@pytest.mark.parametrize("arm", sorted({a for r in STUDY.runs.values() for a in r.arms}))
def test_every_arm_is_a_recipe(arm):
    recipe(arm)


@pytest.mark.parametrize("name", STUDY.factorials)
def test_the_cells_of_a_factorial_are_distinct_arms(name):
    factorial = STUDY.factorials[name]
    arms = [arm for _, arm in factorial.cells()]
    assert len(set(arms)) == 2 ** len(factorial.factors) and set(arms) <= STUDY.arms("short").keys()


def test_every_short_arm_is_a_cell():
    cells = {arm for f in STUDY.factorials.values() for _, arm in f.cells()}
    assert set(STUDY.runs["short"].arms) <= cells


def test_joint_names():
    factors = {"h": ["", "h16"], "a": ["", "sr-xw"], "b": ["", "sr-grad"]}
    f = Factorial("short", "mxfp4", factors, {"sr": ["sr-xw", "sr-grad"]})
    arms = {tuple(levels.values()): arm for levels, arm in f.cells()}
    assert arms[0, 0, 0] == "mxfp4" and arms[1, 1, 1] == "mxfp4+h16+sr" and arms[1, 0, 1] == "mxfp4+h16+sr-grad"
    assert f.effects() == ["h", "a", "b", "h:a", "h:b", "a:b"]


def test_seeds_are_those_that_all_arms_have():
    expected = {"h3-h16": 6, "h4-h16": 3, "fprop-over-wgrad": 2, "h2-sr-converges": 6}
    assert {name: STUDY.seeds(STUDY.claim(name)) for name in expected} == expected
    assert STUDY.seeds(STUDY.claim("p2-square-w")) == 1 and STUDY.seeds(STUDY.claim("decay-mxfp4")) == 2
    assert STUDY.seeds(STUDY.claim("press-persistence")) == STUDY.seeds(STUDY.claim("sr-bias")) == 3
    assert STUDY.seeds(STUDY.claim("p2-mismatch-loss")) == 2


def test_terms():
    assert Contrast("own", arm="a", reference="b").terms == {"a": 1, "b": -1}
    assert Contrast("own", arm="a").terms == {"a": 1} and Contrast("own", weights={"a": 2.0}).terms == {"a": 2}
    with pytest.raises(UserError, match="claim 'nothing' is not known; allowed: h3-h16, "):
        STUDY.claim("nothing")


# What the file may not say


def write(tmp_path, change):
    data = copy.deepcopy(DATA)
    change(data)
    path = tmp_path / "study.yml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


def set_in(*keys, to):
    def change(data):
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = to

    return change


FIRST = ("claims", 0)
BAD = [
    (set_in("extra", to=1), "study study.yml: field 'extra' is not known; allowed: sources, runs, "),
    (lambda d: d.pop("analysis"), "study study.yml lacks the field 'analysis'"),
    (set_in(*FIRST, "why", to=1), "claim 'h3-h16': field 'why' is not known; allowed: id, paper, question, "),
    (lambda d: d["claims"][0].pop("fails_when"), "claim 'h3-h16' lacks the field 'fails_when'"),
    (set_in(*FIRST, "contrast", "arm", to="mxfp5"), "claim 'h3-h16': arm of runs 'main' 'mxfp5' is not known; allowed: bf16, mxfp4, "),
    (set_in(*FIRST, "contrast", "outcome", to="loss"), "claim 'h3-h16': outcome 'loss' is not known; allowed: own, bf16, training, "),
    (set_in(*FIRST, "contrast", "budget", to="half"), "claim 'h3-h16': budget 'half' is not known; allowed: full, third, two_thirds"),
    (set_in(*FIRST, "contrast", "seed", to=0), "claim 'h3-h16': contrast: field 'seed' is not known; allowed: outcome, arm, "),
    (set_in(*FIRST, "paper", to="P3"), "claim 'h3-h16': paper 'P3' is not known; allowed: P1, P2, press, ours"),
    (set_in(*FIRST, "kind", to="main"), "claim 'h3-h16': kind 'main' is not known; allowed: primary, exploratory"),
    (set_in(*FIRST, "question", to="H9"), "claim 'h3-h16': question 'H9' is not known; allowed: H1, "),
    (set_in(*FIRST, "runs", to="core"), "claim 'h3-h16': runs 'core' is not known; allowed: main, "),
    (set_in(*FIRST, "holds", to={"less": 0}), "claim 'h3-h16': rule 'less' is not known; allowed: below, above, "),
    (set_in(*FIRST, "holds", to={"below": 0, "above": 1}), "is not one rule; allowed: below, above, "),
    (set_in(*FIRST, "holds", to={"below": "none"}), "claim 'h3-h16': bound 'none' of below is not a number"),
    (set_in(*FIRST, "holds", to={"in_seeds": "all"}), "rule 'in_seeds' does not fit outcome 'own'"),
    (set_in(*FIRST, "contrast", "weights", to={"bf16": 1}), "exactly one of: arm, weights, arms, factorial"),
    (set_in(*FIRST, "contrast", "probe", to="g-bias"), "a contrast has the outcome probe and names a probe, or neither"),
    (set_in(*FIRST, "contrast", to={"outcome": "probe", "probe": "heat", "arm": "mxfp4"}), "probe 'heat' is not known"),
    (set_in(*FIRST, "contrast", to={"outcome": "probe", "probe": "w-mismatch", "arm": "mxfp5"}), "recipe 'mxfp5' is not known"),
    (set_in(*FIRST, "contrast", to={"outcome": "own", "factorial": "cube", "effect": "W"}), "factorial 'cube' is not known"),
    (set_in(*FIRST, "contrast", to={"outcome": "own", "factorial": "blocks", "effect": "Z"}), "effect 'Z' is not known; allowed: W, X"),
    (set_in(*FIRST, "contrast", to={"outcome": "own", "arms": ["mxfp4"], "predictor": "luck"}), "predictor 'luck' is not known"),
    (set_in("claims", 1, "id", to="h3-h16"), "claim 'h3-h16' is in the study twice; ids are unique"),
    (set_in("claims", 0, to="h1"), "claim 'h1' is not a set of fields"),
    (set_in("runs", "main", "source", to="C"), "runs 'main': source 'C' is not known; allowed: A, B"),
    (set_in("runs", "main", "budgets", to=["tenth"]), "runs 'main': budget 'tenth' is not known"),
    (set_in("runs", "main", "arms", "bf16", to=0), "runs 'main': arm 'bf16' has 0 seeds; allowed: 1 or more"),
    (set_in("runs", "short", "borrows", "runs", to="short"), "runs 'short': borrows runs 'short' is not known"),
    (set_in("factorials", "blocks", "base", to="mxfp4+floor"), "factorial 'blocks': arm 'mxfp4+floor' is not known"),
]  # fmt: skip


@pytest.mark.parametrize("change, message", BAD, ids=[message for _, message in BAD])
def test_what_is_wrong_is_named_in_one_line(tmp_path, change, message):
    with pytest.raises(UserError) as error:
        load_study(write(tmp_path, change))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="cannot read the study .*: No such file"):
        load_study(tmp_path / "none.yml")
    (tmp_path / "study.yml").write_text("a: [1\nb: 2\n")
    with pytest.raises(UserError, match="is not YAML at line 2"):
        load_study(tmp_path / "study.yml")
    (tmp_path / "study.yml").write_text("- a\n")
    with pytest.raises(UserError, match="is not a set of fields"):
        load_study(tmp_path / "study.yml")


# Commits


@pytest.fixture
def checkout(tmp_path):
    """A git checkout: save(data) commits the study and returns the commit."""
    folder = tmp_path / "checkout"
    folder.mkdir()

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *identity, "-C", folder, *arguments], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")

    def save(data, text=None):
        (folder / "study.yml").write_text(text or yaml.safe_dump(data, sort_keys=False))
        git("add", "-A")
        git("commit", "-qm", "study", "--allow-empty", "--no-verify")
        return git("rev-parse", "HEAD")

    save.path, save.git = folder / "study.yml", git
    return save


def changed(**fields):
    data = copy.deepcopy(DATA)
    data["claims"][0].update(fields)
    return data


def test_a_claim_has_the_first_commit_with_its_text(checkout):
    late = copy.deepcopy(DATA)
    removed = late["claims"].pop()
    first = checkout(late)
    second = checkout(DATA)
    found = registrations(checkout.path)
    assert found["h3-h16"].registered == first and found["h3-h16"].changed == ()
    assert found[removed["id"]].registered == second and found["analysis"].registered == first


def test_changes_are_listed_and_late_ones_found(checkout):
    first = checkout(DATA)
    second = checkout(changed(claim="Another."))
    third = checkout(changed(claim="Yet another."))
    found = registrations(checkout.path)
    assert found["h3-h16"].registered == third and found["h3-h16"].changed == (second, third)
    assert found["h1-wgrad"].registered == first and found["h1-wgrad"].changed == ()
    assert changed_after(found["h3-h16"], second, checkout.path) == (third,)
    fourth = checkout(DATA)  # back to the first text: registered then, and three changes since
    assert registrations(checkout.path)["h3-h16"].registered == first
    assert registrations(checkout.path)["h3-h16"].changed == (second, third, fourth)


def test_layout_is_no_change_and_a_setting_is_one(checkout):
    first = checkout(DATA)
    checkout(DATA, text="# a comment\n" + yaml.safe_dump(DATA, width=40))
    assert registrations(checkout.path)["h3-h16"] == registrations(checkout.path)["h1-wgrad"]
    assert registrations(checkout.path)["h3-h16"].registered == first
    data = copy.deepcopy(DATA)
    data["runs"]["main"]["arms"]["mxfp4+h16"] = 5
    data["runs"]["text"]["tokens"] = 1
    data["analysis"]["power"] = 0.9
    last = checkout(data)
    found = registrations(checkout.path)
    moved = {name for name, r in found.items() if r.changed}
    assert {"h3-h16", "text-h16", "p2-top1-text", "analysis"} <= moved and "h1-wgrad" not in moved
    assert all(found[name].changed == (last,) for name in moved)


def test_a_version_that_is_not_yaml_is_passed_over(checkout):
    first = checkout(DATA)
    checkout(DATA, text="claims: [\n")
    checkout(DATA)
    assert registrations(checkout.path)["h3-h16"].registered == first
    assert registrations(checkout.path)["h3-h16"].changed == ()


def test_no_commit_is_said_with_its_reason(checkout, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "study.yml").write_text(yaml.safe_dump(DATA))
    found = registrations(alone / "study.yml")["h3-h16"]
    assert found.registered is None and found.changed == () and found.note == "not a git checkout"
    checkout(DATA)
    checkout.path.write_text(yaml.safe_dump(changed(claim="Not yet committed.")))
    assert registrations(checkout.path)["h3-h16"].note == "this text is not committed"
    checkout(DATA)
    copied = tmp_path / "copied"
    checkout.git("clone", "-q", "--depth", "1", f"file://{checkout.path.parent}", str(copied))
    found = registrations(copied / "study.yml")["h3-h16"]
    assert found.registered is None and "git fetch --unshallow" in found.note


def test_texts_of_anything():
    assert claim_texts(None) == {} and set(claim_texts({"claims": [{"id": "a"}]})) == {"analysis", "a"}


def test_budgets_are_those_of_the_runs():
    assert {b for r in STUDY.runs.values() for b in r.budgets} <= set(BUDGETS)

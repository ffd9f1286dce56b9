import subprocess
import sys

import pytest

from moco.cli import main
from moco.errors import UserError
from moco.evaluation_settings import (
    TASKS,
    FewShotSettings,
    FineTuneSettings,
    HealthSettings,
    KnnSettings,
    LinearSettings,
    inspection,
)


def test_every_field_is_described_and_starts_at_a_value_that_is_allowed():
    for kind in (*TASKS.values(), HealthSettings):
        for name, field in kind.model_fields.items():
            assert field.description, (kind, name)
    assert inspection(KnnSettings, {}).k == 200
    assert inspection(LinearSettings, {"lr": "auto"}).lr == "auto"


def test_percentages_and_sources_of_labels_go_together():
    found = inspection(FewShotSettings, {"labels": ["1%", "10%", "y.npy"]})
    assert found.shares == (0.01, 0.1)
    assert found.label_source == "y.npy"
    assert inspection(FewShotSettings, {"labels": "5%"}).shares == (0.05,)
    assert inspection(FineTuneSettings, {}).shares == ()  # all labels
    assert inspection(FewShotSettings, {"shots": (1, 5), "labels": "folder"}).label_source == "folder"


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (KnnSettings, {"k": 0}, "k = 0: must be greater than 0"),
        (KnnSettings, {"kk": 5}, "unknown setting 'kk'; did you mean k"),
        (KnnSettings, {"temperature": float("nan")}, "temperature"),
        (LinearSettings, {"lr": -1}, "lr = -1"),
        (LinearSettings, {"protocol": "slow"}, "protocol = 'slow'"),
        (FewShotSettings, {}, "either --labels 1% 10% or --shots 1 5 10"),
        (FewShotSettings, {"labels": ["1%"], "shots": (1,)}, "either --labels"),
        (FewShotSettings, {"labels": ["one%"]}, "takes percentages such as 1% 10%, not one%"),
        (FewShotSettings, {"labels": ["a.npy", "b.npy"]}, "takes percentages"),
        (FewShotSettings, {"labels": ["200%"]}, "above 0 and below 100, not 200%"),
        (FewShotSettings, {"shots": (0,)}, "shots"),
        (FineTuneSettings, {"shots": (1,), "labels": ["1%"]}, "either --labels"),
        (FineTuneSettings, {"unlabelled": "photos/"}, "--unlabelled is for the contrastive loss"),
        (FineTuneSettings, {"save": "weights.pt"}, "must end in .safetensors"),
        (FineTuneSettings, {"layer_decay": 1.5}, "layer_decay = 1.5"),
        (FineTuneSettings, {"validation_share": 1}, "validation_share = 1"),
    ],
)
def test_mistakes_are_one_line(kind, given, message):
    with pytest.raises(UserError, match=message) as caught:
        inspection(kind, given)
    assert "\n" not in str(caught.value)


def test_the_help_says_what_nothing_stands_for(capsys):
    for words in (["eval", "fewshot"], ["eval", "finetune"], ["eval", "knn"], ["embed"]):
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert "(default: )" not in text
        assert "(default: none)" not in text
        assert "side of a picture in pixels (default: that of the published weights; of random ones 224, or" in text


@pytest.mark.parametrize("text", ["nan", "NaN", "-inf"])
def test_what_is_no_number_is_quoted_as_other_numbers_are(capsys, text):
    assert main(["eval", "knn", "resnet18", "photos", f"--temperature={text}"]) == 2
    assert capsys.readouterr().err == f"moco: temperature = {text.lower()}: must be a finite number\n"


def test_they_need_no_torch():
    check = "import sys, moco.evaluation_settings\nassert not {'torch', 'timm', 'cv2', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)

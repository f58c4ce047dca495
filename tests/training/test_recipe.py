"""The recipes that come with the library: each loads, builds, names its table, and has the settings of its paper."""

import re
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import write_model

import hardneg as hn
from hardneg import methods
from hardneg.graphs.data import GraphSet
from hardneg.graphs.features import extract_graphs
from hardneg.losses.hardening import BelowPositive, Exponential, Uniform
from hardneg.losses.infonce import InfoNCE
from hardneg.losses.jsd import JSD
from hardneg.randomness import generator
from hardneg.text.features import extract_texts
from hardneg.text.text_set import TextSet
from hardneg.training import build, optimizers, recipe, yaml_files

FOLDER = Path(recipe.__file__).parents[1] / "recipes"
FILES = sorted(FOLDER.glob("*.yaml"))
OWN = [FOLDER / "my-images.yaml", FOLDER / "my-graphs.yaml"]
SMALL = ("sentences-simcse", "sentences-quickthoughts", "my-images", "my-graphs")
PAPERS = [file for file in FILES if not file.stem.startswith("digits") and file.stem not in SMALL]


def stem(file: Path) -> str:
    return file.stem


def load(name: str, *overrides: str) -> recipe.Recipe:
    return recipe.load(FOLDER / f"{name}.yaml", overrides)


GRAPHS = [file for file in FILES if "tu:" in file.read_text() or file.stem == "my-graphs"]
TEXTS = [file for file in FILES if file.stem.startswith("sentences")]


@pytest.mark.parametrize("file", TEXTS, ids=stem)
def test_a_recipe_for_texts_loads_and_its_method_can_be_built(file: Path, tmp_path: Path) -> None:
    settings = recipe.load(file)
    assert recipe.load(recipe_text_as_mapping(settings)) == settings
    overrides = [f"encoder.name={write_model(tmp_path / 'model')}"] if "wiki" in file.stem else []
    texts = TextSet(["the cat sat .", "a dog ran .", "the mat"])
    module = build.method(recipe.load(file, overrides), texts)
    assert torch.isfinite(module.loss(module.look_up(torch.arange(3)), torch.arange(3), None))
    assert extract_texts(module.encoder, texts).shape[0] == 3


@pytest.mark.parametrize("file", GRAPHS, ids=stem)
def test_a_recipe_for_graphs_loads_and_its_method_can_be_built(file: Path) -> None:
    pytest.importorskip("torch_geometric", reason="graphs need torch_geometric")
    settings = recipe.load(file)
    assert recipe.load(recipe_text_as_mapping(settings)) == settings
    path = torch.tensor([[0, 1], [1, 0]])
    graphs = GraphSet(torch.ones(3, 1), path, torch.tensor([0, 2, 3]), torch.tensor([0, 1]))
    module = build.method(settings.with_batch_size(2), graphs)
    assert extract_graphs(module.encoder, graphs).shape == (2, 96)


@pytest.mark.parametrize("file", [file for file in FILES if file not in GRAPHS + TEXTS], ids=stem)
def test_a_recipe_loads_and_each_of_its_parts_can_be_built(file: Path) -> None:
    settings = recipe.load(file)
    assert isinstance(settings.make_loss(), InfoNCE)
    assert recipe.load(recipe_text_as_mapping(settings)) == settings
    side = settings.data.size or (8 if settings.data.source == "digits" else 96 if "stl10" in file.stem else 32)
    views = settings.kind.views(settings.views, (3, side, side))
    images = torch.randint(0, 256, (2, 1 if side == 8 else 3, side, side), dtype=torch.uint8)
    made = views(images, generator("cpu", 0), views=2)
    assert made.shape[2:] == (settings.views.options.get("size", side),) * 2
    encoder = make_encoder(settings, tuple(images.shape[1:])).eval()
    assert encoder(made[:1]).shape == (1, encoder.features)
    optimizers.build(settings.optimizer.name, [encoder], settings.optimizer.lr, settings.optimizer.weight_decay)
    rate = optimizers.learning_rate(settings.optimizer.schedule, settings.optimizer.warmup / settings.trainer.epochs)
    assert rate(0.5) > 0


def make_encoder(settings: recipe.Recipe, shape: tuple[int, ...]) -> Any:
    return methods.get(settings.method).make_encoder(settings.kind, settings.encoder, shape)


def recipe_text_as_mapping(settings: recipe.Recipe) -> dict[str, Any]:
    import yaml

    tree: dict[str, Any] = yaml.safe_load(recipe.dump(settings))
    return tree


@pytest.mark.parametrize("file", PAPERS, ids=stem)
def test_a_recipe_names_the_table_it_reproduces(file: Path) -> None:
    about = recipe.load(file).about
    numbered = r"(HCL|H-SCL|ProSampler|Ring|MoCo) (table|figure|appendix|section) [0-9IVA-F.]+ on "
    assert re.match(rf"{numbered}|Awasthi et al\. 2022, ", about), about  # a talk has no numbers of figures


@pytest.mark.parametrize("file", [file for file in FILES if file in [*PAPERS, *TEXTS, *OWN]], ids=stem)
def test_the_overrides_in_the_comments_are_accepted(file: Path) -> None:
    """Each line of a comment offers overrides, with alternatives between bars and further values in brackets."""
    tried = 0
    for line in file.read_text().splitlines():
        for offer in line.split("|") if line.startswith("#") else ():
            # One in quotes may hold spaces; the value of another ends at a space, a comma, a semicolon or a bracket.
            found = re.findall(r'"([a-z_.]+=\{.*?\})"|\b([a-z_]+(?:\.[a-z_]+)*=[^\s,;)…]+)', offer)
            if overrides := [quoted or plain for quoted, plain in found]:
                recipe.load(file, overrides)
                tried += 1
    assert tried >= 2


def test_no_two_recipes_differ_by_one_override_only() -> None:

    def leaves(tree: Any, where: str = "") -> dict[str, Any]:
        if not isinstance(tree, dict) or not tree:
            return {where: tree}
        return {place: leaf for key, below in tree.items() for place, leaf in leaves(below, f"{where}.{key}").items()}

    # These change nothing that is trained.
    unused_in_training = {".about", ".trainer.knn_every", ".trainer.insight_every"}
    flat = {file.stem: leaves(recipe_text_as_mapping(recipe.load(file))) for file in FILES}
    for one, settings in flat.items():
        for other, others in flat.items():
            keys = (settings.keys() | others.keys()) - unused_in_training
            different = [key for key in keys if settings.get(key) != others.get(key)]
            assert one == other or len(different) > 1, (one, other, different)


# HCL, appendix D.1: "We use a ResNet-50 … as the backbone with embedding dimension 2048 …, and projection head into the
# lower 128-dimensional space …. We use the Adam optimizer … with learning rate 0.001 and weight decay 10^-6. … Unless
# otherwise stated, all models are trained for 400 epochs."
@pytest.mark.parametrize("name", ["cifar10-simclr", "cifar100-simclr", "stl10-simclr", "tinyimagenet-simclr"])
def test_hcl_settings_are_those_of_its_appendix(name: str) -> None:
    settings = load(name)
    assert settings.encoder.name == ("resnet18" if name == "cifar10-simclr" else "resnet50")  # which its about says
    assert settings.encoder.outputs == 128
    assert (settings.optimizer.name, settings.optimizer.lr, settings.optimizer.weight_decay) == ("adam", 1e-3, 1e-6)
    assert settings.trainer.epochs == 400
    assert settings.objective["temperature"] == 0.5
    # "the negative batch sizes are 30, 62, 126, 254, 510": 2(B − 1)
    assert 2 * (settings.trainer.batch_size - 1) == 510


def test_rows_of_hcl_table_one_are_overrides_of_its_recipes() -> None:
    # Table 1: "Class prior is set to τ+ = 0.01", "Hard (β = 1)"
    hard = load("tinyimagenet-simclr", "objective.preset=hcl", "objective.tau_plus=0.01").make_loss()
    assert hard.class_prior == 0.01
    assert hard.hardening[0].at(0.0).tilt() == 1.0
    # Figure 4: "once every e/ℓ epochs we reduce β_i by β/ℓ"
    anneal = "objective.beta={schedule: hardness_anneal, beta: 1, changes: 4}"
    annealed = load("cifar100-simclr", "objective.preset=hcl", anneal).make_loss()
    tilts = [annealed.hardening[0].at(progress).tilt() for progress in (0.0, 0.25, 0.5, 0.75)]
    assert tilts == [1.0, 0.75, 0.5, 0.25]


def test_a_recipe_can_have_a_hardening_of_its_own_and_one_per_source() -> None:
    simple = load(
        "digits-simclr", "objective.hardening={kind: exponential, beta: 0.5}", "objective.normalize_weights=false"
    )
    assert simple.make_loss().hardening == (Exponential(0.5),)
    assert not simple.make_loss().normalize_weights
    upper = "{schedule: linear, start: 1.0, end: 0.9}"
    several = f"objective.hardening=[{{kind: ring, lower: 0.1, upper: {upper}}}, {{kind: uniform}}]"
    ring = load("digits-simclr", several, "objective.combine_positives=log_of_sum").make_loss()
    assert ring.hardening[0].at(1.0).percentiles() == (0.1, 0.9)
    by_source = "objective.hardening={given: {kind: below_positive, relative: 0.95}}"
    settings = load("digits-moco", by_source)
    assert dict(settings.make_loss().hardening) == {"given": (BelowPositive(relative=0.95),)}
    assert recipe.load(recipe_text_as_mapping(settings)) == settings


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "objective.hardening={kind: exponentiel}",
            "objective.hardening.kind='exponentiel' is not known: did you mean",
        ),
        ("objective.hardening={batch: {kind: rings}}", "objective.hardening.batch.kind='rings' is not known"),
        ("objective.hardening={beta: 1.0}", "objective.hardening has no kind: choose one of below_positive"),
        ("objective.hardening=exponential", "objective.hardening must be a mapping such as"),
        ("objective.hardening={kind: exponential, alpha: 1.0}", "objective.hardening: .*alpha"),
        ("objective.hardening={kind: exponential, beta: -1.0}", "beta must be ≥ 0"),
        ("objective.normalize_weights=maybe", "normalize_weights must be True or False"),
    ],
)
def test_a_wrong_hardening_in_a_recipe_is_an_error(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("digits-simclr", override)


# H-SCL, section V.A: "All models are trained for 200 epochs with a batch size of 512. We use the Adam optimizer with a
# learning rate of 0.001 and weight decay of 10^-6. We set γ to 0.5", "projection head dimension of 128 with ResNet-50"
@pytest.mark.parametrize("name", ["cifar100-hscl", "stl10-hscl", "tinyimagenet-hscl"])
def test_hscl_settings_are_those_of_its_section_five(name: str) -> None:
    settings = load(name)
    assert (settings.trainer.epochs, settings.trainer.batch_size) == (200, 512)
    assert (settings.optimizer.name, settings.optimizer.lr, settings.optimizer.weight_decay) == ("adam", 1e-3, 1e-6)
    assert (settings.encoder.name, settings.encoder.outputs) == ("resnet50", 128)
    loss = settings.make_loss()
    assert (loss.temperature, loss.supervision) == (0.5, "full")


def test_the_threshold_of_hscl_follows_equation_four() -> None:
    # "τ = e^{l(start, end, epoch)/γ}", l linear from start to end over the 200 epochs
    override = ["objective.preset=hscl_threshold", "objective.start=-0.5", "objective.end=0.1"]
    loss = load("cifar100-hscl", *override).make_loss()
    for epoch in (1, 100, 200):
        progress = (epoch - 1) / 199
        lower, upper = loss.hardening[0].at(progress).in_scores(loss.temperature).bounds(None)
        assert float(lower) == pytest.approx((-0.5 + progress * 0.6) / 0.5)  # the bound on s is log τ
        assert upper is None


# ProSampler, appendix E.1: "For CIFAR10, CIFAR100 and STL10, all models are trained for 1000 epochs with the default
# batch size B of 256. We use the Adam optimizer … with learning rate of 0.001 …. The temperature parameter is set as
# 0.5 and the dimension of image embedding is set as 128." "we update the proximity graph per 100 training iterations.
# We fix the number of neighbors K as 100 for CIFAR10, CIFAR100 and STL10. The size of neighbor candidate set M is set
# as 1000 for CIFAR100 and STL10, and 500 for CIFAR10. Besides, the initial restart probability α … is set to 0.2 and
# decays linearly to 0.05"
@pytest.mark.parametrize(("data", "candidates"), [("cifar10", 500), ("cifar100", 1000), ("stl10", 1000)])
def test_prosampler_settings_of_the_small_sets_are_those_of_its_appendix(data: str, candidates: int) -> None:
    settings = load(f"{data}-simclr-prosampler")
    assert (settings.trainer.epochs, settings.trainer.batch_size) == (1000, 256)
    assert (settings.optimizer.name, settings.optimizer.lr) == ("adam", 1e-3)
    # "projected to a 128-D image embedding via a two-layer MLP (2048-D hidden layer …)"
    assert (settings.encoder.name, settings.encoder.hidden, settings.encoder.outputs) == ("resnet50", 2048, 128)
    assert settings.objective["temperature"] == 0.5
    batches = settings.batches
    assert (batches.sampler, batches.candidates, batches.neighbors) == ("proximity", candidates, 100)
    assert batches.restart == {"schedule": "linear", "start": 0.2, "end": 0.05}
    assert batches.refresh_every == 100


# The same: "For ImageNet-100 and ImageNet, we train the models with 100 and 400 epochs respectively, and use LARS …
# with learning rate of 0.3 × B/256 and weight decay of 10^-6. Here, the batch size is set as 2048 for ImageNet and 512
# for ImageNet-100 …. We fix the temperature parameter as 0.1"; "we keep M as 1000 and K as 500. The restart
# probability α is fixed as 0.1." Table 11: "(t = 100)" under ImageNet-100, "(t = 500)" under ImageNet.
@pytest.mark.parametrize(("data", "batch", "refresh"), [("imagenet100", 512, 100), ("imagenet", 2048, 500)])
def test_prosampler_settings_of_imagenet_are_those_of_its_appendix(data: str, batch: int, refresh: int) -> None:
    settings = load(f"{data}-simclr-prosampler")
    assert (settings.trainer.epochs, settings.trainer.batch_size) == (100, batch)  # table 1's first column
    assert settings.optimizer.name == "lars"
    assert settings.optimizer.lr == pytest.approx(0.3 * batch / 256)
    assert settings.optimizer.weight_decay == 1e-6
    assert settings.objective["temperature"] == 0.1
    batches = settings.batches
    assert (batches.candidates, batches.neighbors, batches.restart) == (1000, 500, 0.1)
    assert batches.refresh_every == refresh
    assert load(f"{data}-simclr-prosampler", "batches.sampler=uniform").batches.sampler == "uniform"


# HCL, appendix D.2: "we used the GIN architecture … with K = 3 layers and embedding dimension d = 32. Each model is
# trained for 200 epochs with batch size 128 using the Adam optimizer … with learning rate 0.001, and weight decay of
# 10^-6." H-SCL, section V.C: "All models are trained for 200 epochs and we use the Adam optimizer with a learning rate
# 0.01. We used the 3-layer GIN … with a representation dimension equal to 32."
@pytest.mark.parametrize(("name", "lr"), [("mutag-infograph", 1e-3), ("mutag-infograph-hscl", 1e-2)])
def test_infograph_settings_are_those_of_the_papers(name: str, lr: float) -> None:
    settings = load(name)
    assert (settings.trainer.epochs, settings.trainer.batch_size) == (200, 128)
    assert (settings.optimizer.name, settings.optimizer.lr, settings.optimizer.weight_decay) == ("adam", lr, 1e-6)
    pytest.importorskip("torch_geometric", reason="graphs need torch_geometric")
    encoder = make_encoder(settings, (1,))
    assert (len(encoder.layers), encoder.features) == (3, 3 * 32)


# H-SCL, table II: UCL, H-UCL, SCL, H-SCL(β), "the best values of β over the set {1, 2, 10}"
def test_hscls_four_losses_on_graphs_are_overrides_of_one_recipe() -> None:
    for supervision in ("none", "negatives"):
        for beta in (0, 1, 2, 10):
            overrides = f"objective.supervision={supervision}", f"objective.beta={beta}"
            loss = load("mutag-infograph-hscl", *overrides).make_loss()
            assert isinstance(loss, JSD)
            assert (loss.supervision, loss.beta, loss.class_prior) == (supervision, beta, 0)
    assert load("mutag-infograph-hscl").make_loss().supervision == "negatives"


# ProSampler, appendix E.2: "We apply Adam optimizer … with a learning rate of 0.01, and 3-layer GIN with a fixed hidden
# size of 32. We set the temperature as 0.2 and gradually decay the restart probability of RWR (0.2 ∼ 0.05)", and table
# 8: batch size, epochs, t, M, K
@pytest.mark.parametrize(
    ("name", "source", "table"),
    [
        ("imdb-binary-graphcl", "tu:IMDB-BINARY", (256, 100, 25, 300, 100)),
        ("imdb-multi-graphcl", "tu:IMDB-MULTI", (128, 50, 25, 300, 100)),
        ("collab-graphcl", "tu:COLLAB", (128, 20, 50, 1000, 100)),
        ("reddit-binary-graphcl", "tu:REDDIT-BINARY", (128, 50, 50, 500, 100)),
    ],
)
def test_prosampler_settings_of_graphs_are_those_of_its_appendix(
    name: str, source: str, table: tuple[int, ...]
) -> None:
    settings = load(name, "batches.sampler=proximity")
    batches, training = settings.batches, settings.trainer
    found = training.batch_size, training.epochs, batches.refresh_every, batches.candidates, batches.neighbors
    assert (settings.data.source, found) == (source, table)
    assert batches.restart == {"schedule": "linear", "start": 0.2, "end": 0.05}
    assert (settings.optimizer.name, settings.optimizer.lr) == ("adam", 1e-2)
    assert settings.objective["temperature"] == 0.2
    for preset, prior in (("graphcl", 0.0), ("debiased", 0.1), ("hcl", 0.1)):
        loss = load(name, f"objective.preset={preset}", "objective.in_batch=other").make_loss()
        assert isinstance(loss, InfoNCE)
        assert (loss.temperature, loss.in_batch, loss.class_prior) == (0.2, "other", prior)


# HCL, appendix D.3: "We adopt the official quick-thoughts vectors experimental settings … We keep all hyperparameters
# at the default values". Those of its code (run.sh, train.py, BS400-W620-S1200-case-bidir/train.json): batch_size 400,
# sequence_length 30, nepochs 1, learning_rate 0.0005, clip_gradient_norm 5, context_size 1, encoder_dim 1200, bidir
# true, dim 620, shuffle_input_data False
def test_quick_thoughts_settings_are_those_of_its_published_code() -> None:
    settings = load("sentences-books-quickthoughts")
    assert (settings.trainer.batch_size, settings.trainer.epochs, settings.data.max_length) == (400, 1, 30)
    assert (settings.optimizer.name, settings.optimizer.lr, settings.optimizer.clip) == ("adam", 5e-4, 5.0)
    options = settings.encoder.options
    assert (options["width"], options["word_dim"], options["bidirectional"]) == (1200, 620, True)
    assert settings.batches.sampler == "consecutive"
    for objective, hardening, prior in (
        ("{preset: simclr}", Uniform(), 0.0),
        ("{preset: debiased}", Uniform(), 0.1),
        ("{preset: hcl, beta: 1, tau_plus: 0}", Exponential(1), 0.0),
    ):
        made = build.loss(load("sentences-books-quickthoughts", f"objective={objective}"))
        assert isinstance(made, InfoNCE)
        assert (made.in_batch, made.normalize, made.temperature, made.weight_range) == (None, False, 1.0, 2.0)
        assert made.hardening in ((hardening,), hardening, ())
        assert made.class_prior == prior


# ProSampler, appendix E.3: "Following the training setting of SimCSE, we train the model for one epoch … Proximity
# graph will be only built once based on the pretrained language models before training. For BERT, we set the batch size
# to 64 and learning rate to 3 × 10^-5. For RoBERTa, the batch size is set as 512 and learning rate is fixed as 10^-5.
# We keep the temperature as 0.05, the number of neighbor candidates M as 1000, the number of neighbors K as 500, and
# the restart probability α as 0.7"
def test_prosampler_settings_of_sentences_are_those_of_its_appendix() -> None:
    settings = load("sentences-wiki-simcse-prosampler")
    assert (settings.trainer.batch_size, settings.trainer.epochs, settings.optimizer.lr) == (64, 1, 3e-5)
    batches = settings.batches
    assert (batches.sampler, batches.candidates, batches.neighbors, batches.restart) == ("proximity", 1000, 500, 0.7)
    assert batches.refresh_every == 0  # once
    for preset in ("simcse", "debiased", "hcl"):
        loss = load("sentences-wiki-simcse-prosampler", f"objective.preset={preset}").make_loss()
        assert isinstance(loss, InfoNCE)
        assert (loss.temperature, loss.in_batch) == (0.05, "other")
    assert settings.evaluation.metrics == ("sts12", "sts13", "sts14", "sts15", "sts16", "stsb", "sickr")


def accepted(schema: dict[str, Any], value: Any, definitions: dict[str, Any]) -> bool:
    """Whether a JSON schema accepts a value; the keywords that our schema uses."""
    if "$ref" in schema:
        return accepted(definitions[schema["$ref"].rpartition("/")[2]], value, definitions)
    if "anyOf" in schema:
        return any(accepted(option, value, definitions) for option in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return value in schema.get("enum", [schema.get("const")])
    types: dict[str, Any] = {
        "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
        "null": type(None),
    }  # fmt: skip
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, types[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return False
    if isinstance(value, dict):
        if any(key not in value for key in schema.get("required", ())):
            return False
        properties, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
        further = [key for key in value if key not in properties]
        return all(
            accepted(properties[key], below, definitions) for key, below in value.items() if key in properties
        ) and (
            rest is True
            or (rest is not False and all(accepted(rest, value[key], definitions) for key in further))
            or not further
        )
    if isinstance(value, list):
        return all(accepted(schema.get("items", {}), each, definitions) for each in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = schema.get("minimum", -inf), schema.get("maximum", inf)
        return bool(low <= value <= high and schema.get("exclusiveMinimum", -inf) < value)
    return True


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return recipe.json_schema()


@pytest.mark.parametrize("file", FILES, ids=stem)
def test_the_json_schema_accepts_our_recipes_and_rejects_misspelt_keys(file: Path, schema: dict[str, Any]) -> None:
    pytest.importorskip("torch_geometric", reason="graphs need torch_geometric")
    tree = yaml_files.read_mapping(file)
    whole = recipe_text_as_mapping(recipe.load(file))
    for written in (tree, whole):
        assert accepted(schema, written, schema["$defs"])
    for section, key in (("trainer", "epoch"), ("memory", "queu"), ("objective", "temprature"), ("data", "sources")):
        assert not accepted(schema, {**whole, section: {**whole[section], key: 3}}, schema["$defs"])
    assert not accepted(schema, {**tree, "trainers": {}}, schema["$defs"])
    assert not accepted(schema, {**tree, "trainer": {**tree["trainer"], "epochs": "many"}}, schema["$defs"])
    try:
        import jsonschema
    except ImportError:
        return
    for written in (tree, whole):
        jsonschema.validate(written, schema)


def test_the_json_schema_has_the_settings_of_each_method_and_no_others(schema: dict[str, Any]) -> None:
    definitions = schema["$defs"]
    assert accepted(schema, {"seed": 3}, definitions)
    assert not accepted(schema, {"memory": {"queue": 64}}, definitions)  # the default method has no queue
    for name, key in (("moco", "queue"), ("local_aggregation", "background"), ("infograph", None)):
        kind = methods.get(name).modalities[0]
        written = {"method": name, "modality": kind, "memory": {} if key is None else {key: 64}}
        assert accepted(schema, written, definitions)
        for other in ("simclr", "moco", "cmc", "graphcl"):
            if other != name and key is not None:
                assert not accepted(
                    schema, {**written, "method": other, "modality": methods.get(other).modalities[0]}, definitions
                )


def test_a_private_function_is_not_a_preset() -> None:
    with pytest.raises(ValueError, match=r"objective.preset='_with' is not known"):
        recipe.load({"objective": {"preset": "_with"}}).make_loss()


def test_an_unknown_metric_is_an_error_before_training() -> None:
    with pytest.raises(ValueError, match="metric='knm' is not known: did you mean 'knn'"):
        recipe.load({}, ["evaluation.metrics=[knm]"])
    assert recipe.load({}, ["evaluation.metrics=[knn, few_3]"]).evaluation.metrics == ("knn", "few_3")


@pytest.mark.parametrize(
    "override", ["objective.beta=effective_share:0.6", "objective.beta={effective_share: 0.6}"]
)  # fmt: skip
def test_beta_may_be_an_effective_share(override: str) -> None:
    for more in (["objective.preset=hcl", override], [override.replace("beta", "hardening.beta"), *EXPONENTIAL]):
        loss = recipe.load(recipe.find("digits-simclr"), more).make_loss()
        assert loss.hardening[0] == hn.Exponential(hn.EffectiveShare(0.6))
    auto = recipe.load(recipe.find("digits-simclr"), ["objective.preset=auto"]).make_loss()
    assert auto.hardening == hn.auto().hardening


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("effective_share:2", r"objective\.beta: share must be > 0 and ≤ 1, got 2"),
        ("effective_share:much", r"objective\.beta='effective_share:much': effective_share takes a number in \(0, 1\]"),
        ("{effective_share: 0.6, until: 1}", r"objective\.beta: effective_share takes no further keys, got until"),
        ("{effective_share: half}", r"objective\.beta: share must be a number or a schedule, got 'half'"),
        ("{share: 0.6}", r"objective\.beta\.schedule='None' is not known"),
    ],
)
def test_a_wrong_effective_share_names_its_key(value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe.load(recipe.find("digits-simclr"), ["objective.preset=hcl", f"objective.beta={value}"])


EXPONENTIAL = ["objective.preset=simclr", "objective.hardening.kind=exponential"]

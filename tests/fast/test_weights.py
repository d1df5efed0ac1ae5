"""A model's weights as a file: the format is safetensors', whatever the tensors are."""

import torch
from safetensors.torch import load, save

from headrace.trainer.weights import load_weight_file, weight_file


class Odd(torch.nn.Module):
    """Every kind of tensor at once: each dtype, a scalar, an empty one, a transposed one, and two that are tied."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.z_half = torch.nn.Parameter(torch.randn(3, 5).half())
        self.brain = torch.nn.Parameter(torch.randn(7).bfloat16())
        self.first = torch.nn.Linear(4, 3)
        self.tied = torch.nn.Linear(4, 3, bias=False)
        self.tied.weight = self.first.weight
        self.turned = torch.nn.Parameter(torch.randn(4, 6).T)
        for name, tensor in {
            "scalar": torch.tensor(2.5),
            "count": torch.tensor(7, dtype=torch.int64),
            "empty": torch.zeros(0, 4),
            "small": torch.arange(5, dtype=torch.int32),
            "short": torch.arange(3, dtype=torch.int16),
            "signed": torch.arange(3, dtype=torch.int8),
            "byte": torch.arange(3, dtype=torch.uint8),
            "flag": torch.tensor([True, False]),
            "wide": torch.randn(2, dtype=torch.float64),
        }.items():
            self.register_buffer(name, tensor)


def written_once(model) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "tied.weight"}


def test_the_file_is_what_safetensors_would_write():
    model = Odd()
    assert weight_file(model) == save(written_once(model), metadata={"format": "pt"})


def test_safetensors_reads_it():
    model = Odd()
    found = load(weight_file(model))
    assert found.keys() == written_once(model).keys()
    for name, tensor in written_once(model).items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_tensors_longer_than_a_piece_are_whole(monkeypatch):
    monkeypatch.setattr("headrace.trainer.weights._PIECE", 7)
    model = Odd()
    assert weight_file(model) == save(written_once(model), metadata={"format": "pt"})


def test_the_file_does_not_change_with_the_model():
    model, other = Odd(0), Odd(1)
    data = weight_file(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model.first.weight.add_(1.0)
    load_weight_file(other, data)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, before[name]), name

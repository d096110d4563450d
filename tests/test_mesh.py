"""How devices become a mesh."""

from __future__ import annotations

import jax
import pytest

from podtune.config.errors import UserError
from podtune.config.schema import Mesh
from podtune.parallel.mesh import build_mesh, describe_mesh


def shape(request, devices=8, **settings):
    mesh = build_mesh(request, jax.devices()[:devices], **settings)
    return tuple(mesh.shape[axis] for axis in ("data", "fsdp", "tensor"))


def test_full_fine_tuning_splits_the_model_and_lora_copies_a_small_one():
    assert shape(Mesh(), method="full") == (1, 8, 1)
    assert shape(Mesh(), method="lora") == (8, 1, 1)


def test_what_is_left_open_is_filled_in():
    assert shape(Mesh(tensor=2), method="full") == (1, 4, 2)
    assert shape(Mesh(data=2)) == (2, 4, 1)
    assert shape(Mesh(fsdp=2, tensor=2)) == (2, 2, 2)
    assert shape(Mesh(), devices=1) == (1, 1, 1)
    assert shape(Mesh(), devices=6) == (6, 1, 1)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Mesh(tensor=3), r"mesh\.tensor=3 does not divide 8 devices\. Use one of 1, 2, 4, 8\."),
        (Mesh(data=2, fsdp=2), r"mesh data=2 x fsdp=2 x tensor=1 makes 4, and there are 8 devices\."),
        (Mesh(data=3), r"mesh data=3 x fsdp=2 x tensor=1 makes 6, and there are 8 devices\."),
    ],
)
def test_axes_that_do_not_multiply_to_the_devices_are_refused_with_a_way_out(request_, message):
    with pytest.raises(UserError, match=message):
        build_mesh(request_)


def test_every_device_is_in_the_mesh_once():
    mesh = build_mesh(Mesh(data=2, fsdp=2, tensor=2))
    assert sorted(device.id for device in mesh.devices.flat) == list(range(8))
    assert describe_mesh(mesh) == "8 CPU devices: data=2 x fsdp=2 x tensor=2"

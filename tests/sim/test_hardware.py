"""Where the simulator's figures come from: a profile file, bandwidths, or what is built in."""

import dataclasses
import json

import pytest
from made_profile import PROFILE
from made_traces import HEADER

from oled_jax.cost.profile import FORMAT, UNMEASURED, Figures, HardwareProfile
from oled_jax.errors import UsageError
from oled_jax.sim.hardware import BUILT_IN_PAGE_BYTES, of_bandwidths, of_profile, read_hardware


def saved(tmp_path, profile: HardwareProfile = PROFILE):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile.as_json()))
    return path


def test_a_profile_gives_both_kinds_of_times(tmp_path):
    hardware = read_hardware(saved(tmp_path), HEADER)
    assert hardware.together == PROFILE.costs
    assert (hardware.alone.h2d_us, hardware.alone.cpu_us(2)) == pytest.approx((120.0, 102.0))
    assert hardware.carrier == "native"
    assert any("0 (not in the profile)" in line for line in hardware.origins)


def test_a_quick_profile_lends_the_cpu_its_times_with_transfers():
    quick = dataclasses.replace(PROFILE, quick=True, alone=Figures(h2d_us=120.0, cpu=None))
    hardware = of_profile(quick, "quick.json")
    assert hardware.alone == dataclasses.replace(PROFILE.costs, h2d_us=120.0)
    assert "as with transfers" in " ".join(hardware.origins)


def test_a_profile_of_other_pages_is_refused(tmp_path):
    with pytest.raises(
        UsageError, match=r"pages of D 64, F 32, float32, the trace's are D 64, F 16, float32.*--h2d-gbs"
    ):
        read_hardware(saved(tmp_path), dataclasses.replace(HEADER, moe_intermediate_size=16))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is no hardware profile"),
        ('{"version": 99}', "not a profile of version"),
        (json.dumps({"version": FORMAT}), "fields"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path, text, reason):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=reason):
        read_hardware(path, HEADER)


def test_a_profile_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"none\.json cannot be read: No such file"):
        read_hardware(tmp_path / "none.json", HEADER)


def test_bandwidths_are_10_9_bytes_a_second():
    hardware = of_bandwidths(5_000_000, h2d_gbs=50.0, cpu_gbs=25.0, cpu_token_us=3.0, device_gbs=1000.0)
    assert hardware.alone == hardware.together
    assert (hardware.alone.h2d_us, hardware.alone.cpu_us(2)) == pytest.approx((100.0, 206.0))
    assert (hardware.ffn[0].pages, hardware.ffn[0].us) == pytest.approx((1, 5.0))
    assert not any("built in" in line for line in hardware.origins)


def test_what_is_not_given_is_built_in_and_scaled():
    whole = of_bandwidths(BUILT_IN_PAGE_BYTES)
    half = of_bandwidths(BUILT_IN_PAGE_BYTES // 2, h2d_gbs=50.0)
    assert whole.together == UNMEASURED
    assert half.together.cpu_us(3) == pytest.approx(UNMEASURED.cpu_us(3) / 2)
    assert half.ffn[0].us == pytest.approx(whole.ffn[0].us / 2)
    assert [("built in" in line) for line in half.origins[-3:]] == [False, True, True]


def test_the_size_of_a_page_follows_its_dtype():
    assert HEADER.page_bytes == 3 * 64 * 32 * 4
    assert dataclasses.replace(HEADER, dtype="bfloat16").page_bytes == 3 * 64 * 32 * 2

"""A board's facts, read from the files that a board has."""

from __future__ import annotations

from pathlib import Path

from pom_edge.jetson import find_jetson, known_bad

FILES = {  # as an Orin Nano with JetPack 6.2 has them
    "proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit\0",
    "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64\n",
    "var/lib/nvpmodel/status": "pmode:0002 fmode:fanNull\n",
    "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=15W >\n< POWER_MODEL ID=2 NAME=MAXN_SUPER >\n",
    "proc/swaps": "Filename\tType\tSize\tUsed\tPriority\n/dev/zram0 partition 651628 0 5\n/swap file 8388604 0 -2\n",
    "proc/meminfo": "MemTotal: 7802000 kB\nMemAvailable: 5000000 kB\nNvMapMemUsed:  102400 kB\n",
}


def test_a_board_is_read_from_its_files(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    board = find_jetson(tmp_path)
    assert board is not None
    assert (board.board, board.l4t, board.jetpack) == ("NVIDIA Jetson Orin Nano Developer Kit", "R36.4.3", "6.1 or 6.2")
    assert board.power_mode == "2 (MAXN_SUPER)" and board.nvmap_bytes == 100 << 20
    assert board.swap == ["zram 636.4 MiB", "file 8.00 GiB"]
    for name in ("var/lib/nvpmodel/status", "proc/swaps", "proc/meminfo", "etc/nv_tegra_release"):
        (tmp_path / name).unlink()
    board = find_jetson(tmp_path)
    assert board is not None and board.to_dict()["power mode"].startswith("unknown") and "none; " in board.to_dict()["swap"]


def test_every_jetpack_of_the_docs_has_a_release(tmp_path: Path) -> None:
    for revision, jetpack in (("R38 (release), REVISION: 4.0", "7.1"), ("R39 (release), REVISION: 2.0", "7.2")):
        (tmp_path / "etc").mkdir(exist_ok=True)
        (tmp_path / "etc/nv_tegra_release").write_text(f"# {revision}, GCID: 1\n")
        board = find_jetson(tmp_path)
        assert board is not None and board.jetpack == jetpack


def test_another_machine_is_no_board(tmp_path: Path) -> None:
    assert find_jetson(tmp_path) is None
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    (tmp_path / "proc/device-tree/model").write_text("Raspberry Pi 5 Model B\0")
    assert find_jetson(tmp_path) is None


def test_known_bad_builds() -> None:
    assert "Orin" in (known_bad("10.13.3.9", "Orin") or "")
    assert known_bad("10.13.3.9", "NVIDIA Thor") is None and known_bad("10.13.3.9", None) is None
    assert "ViT" in (known_bad("10.3.0", "Orin") or "") and known_bad("10.30.0", "Orin") is None
    assert known_bad("10.7.0", "Orin") is None

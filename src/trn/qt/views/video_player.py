"""Videos inside the window, where QtMultimedia is: it is in PySide6-Addons (extra `qt-video`), and needs a sound library of the system."""

from typing import Any

from PySide6.QtCore import Qt, QUrl, Slot
from PySide6.QtWidgets import QHBoxLayout, QPushButton, QSlider, QStackedWidget, QVBoxLayout, QWidget


def make_player(stage: QStackedWidget) -> "VideoPlayer | None":
    """Adds its widget to the stage. None where QtMultimedia cannot be imported."""
    try:
        from PySide6.QtMultimedia import QMediaPlayer
        from PySide6.QtMultimediaWidgets import QVideoWidget
    except ImportError:
        return None
    player = VideoPlayer(QMediaPlayer(stage), QVideoWidget())
    stage.addWidget(player.widget)
    return player


class VideoPlayer(QWidget):
    """Plays one file again and again, without sound."""

    def __init__(self, player: Any, picture: QWidget) -> None:
        super().__init__()
        self.widget = self
        self._player = player
        self._button = QPushButton("Pause")
        self._button.clicked.connect(self._pause_or_play)
        self._slider = QSlider(Qt.Orientation.Horizontal)
        self._slider.setAccessibleName("Place in the video")
        self._slider.sliderMoved.connect(self._seek)
        bar = QHBoxLayout()
        bar.addWidget(self._button)
        bar.addWidget(self._slider, 1)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.addWidget(picture, 1)
        column.addLayout(bar)
        player.setVideoOutput(picture)
        player.setLoops(-1)
        player.durationChanged.connect(self._take_duration)
        player.positionChanged.connect(self._take_position)

    @property
    def position_ms(self) -> int:
        return int(self._player.position())

    def play(self, url: QUrl) -> None:
        self._player.setSource(url)
        self._player.play()
        self._button.setText("Pause")

    def stop(self) -> None:
        self._player.stop()
        self._player.setSource(QUrl())

    @Slot()
    def _pause_or_play(self) -> None:
        if self._button.text() == "Pause":
            self._player.pause()
            self._button.setText("Play")
        else:
            self._player.play()
            self._button.setText("Pause")

    @Slot(int)
    def _seek(self, position_ms: int) -> None:
        self._player.setPosition(position_ms)

    @Slot("qlonglong")
    def _take_duration(self, duration_ms: int) -> None:
        self._slider.setMaximum(int(duration_ms))

    @Slot("qlonglong")
    def _take_position(self, position_ms: int) -> None:
        if not self._slider.isSliderDown():
            self._slider.setValue(int(position_ms))

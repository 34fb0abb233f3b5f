"""Files of a run besides checkpoints: videos of episodes, files that the author reports, and which of them are kept."""

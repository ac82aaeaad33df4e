"""phyai_engine: inference engine and pure control logic for robot policies. Nothing here imports ROS."""

__version__ = "0.1.0"

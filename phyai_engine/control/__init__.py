"""What runs on the robot once per control tick, without ROS: sensor samples, requests, and the last writer."""

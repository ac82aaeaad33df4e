"""Everything that imports rclpy or ROS messages. Imports phyai_engine, not the reverse, and never torch."""

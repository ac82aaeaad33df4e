# Jetson Thor (aarch64, JetPack 7). NOT RUN HERE: written and checked by test/engine/test_package.py only, for want of the machine.
#
#   docker build --platform linux/arm64 -f docker/thor.Dockerfile --build-arg TORCH_INDEX_URL=... -t phyai-policy:thor .
#   docker run --runtime nvidia --network host --ipc host phyai-policy:thor \
#       ros2 launch phyai_policy policy.launch.py robot:=arm7 model:=pi05_demo
#
# ROS comes from the distribution, torch from NVIDIA's package index for this JetPack: TORCH_INDEX_URL has no default,
# because the index is named after the JetPack release. Set the power mode on the host first: `sudo nvpmodel -m 0`.
FROM ros:jazzy-ros-base

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# NumPy, Pillow, YAML and cv_bridge stay the distribution's: its cv_bridge is built against its NumPy.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        python3-dev python3-numpy python3-pil python3-venv python3-yaml python3-zmq \
        ros-jazzy-control-msgs ros-jazzy-cv-bridge ros-jazzy-diagnostic-msgs ros-jazzy-rmw-fastrtps-cpp ros-jazzy-trajectory-msgs \
    && rm -rf /var/lib/apt/lists/*

ARG TORCH_INDEX_URL
ARG TORCH_VERSION=2.11.0
RUN : "${TORCH_INDEX_URL:?give --build-arg TORCH_INDEX_URL, the package index of this JetPack}" \
    && python3 -m venv --system-site-packages /opt/phyai \
    && /opt/phyai/bin/pip install --no-cache-dir --index-url "${TORCH_INDEX_URL}" "torch==${TORCH_VERSION}"

# torch is there already; the pins of everything else hold.
COPY requirements/run.txt /tmp/run.txt
RUN sed -i '/^torch==/d' /tmp/run.txt \
    && /opt/phyai/bin/pip install --no-cache-dir --constraint /tmp/run.txt msgspec rich rosbags safetensors typer

COPY . /robot/src/phyai_policy
WORKDIR /robot
RUN source /opt/ros/jazzy/setup.bash \
    && colcon build --cmake-args -DPython3_EXECUTABLE=/opt/phyai/bin/python -DBUILD_TESTING=OFF

RUN useradd --create-home --groups video robot
USER robot
ENV RMW_IMPLEMENTATION=rmw_fastrtps_cpp \
    FASTRTPS_DEFAULT_PROFILES_FILE=/robot/install/phyai_policy/share/phyai_policy/config/fastdds.xml

ENTRYPOINT ["/bin/bash", "-c", "source /robot/install/setup.bash && exec \"$@\"", "--"]
CMD ["ros2", "launch", "phyai_policy", "policy.launch.py"]

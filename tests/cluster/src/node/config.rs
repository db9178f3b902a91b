//! Configuration files of a node's containerd, CNI plugins and kubelet.

use serde_json::json;

use super::Node;
use crate::network::{family, node_address, pods_of};
use crate::{ControlPlane, programs};

impl Node {
    /// Returns the CNI configuration of the pod network.
    pub(super) fn cni(&self) -> serde_json::Value {
        json!({
            "cniVersion": "0.4.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "pods",
                    "isGateway": true,
                    "ipMasq": false,
                    "hairpinMode": true,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": self.folder.join("cni/addresses"),
                        "ranges": [[{ "subnet": pods_of(self.number) }]],
                        "routes": [{ "dst": family().all }],
                    },
                },
                { "type": "portmap", "capabilities": { "portMappings": true } },
            ],
        })
    }

    /// Returns the configuration file of containerd.
    pub(super) fn containerd_config(&self) -> String {
        let folder = self.folder.display();
        let socket = self.socket();
        let socket = socket.display();
        let plugins = programs::CNI_PLUGINS;
        format!(
            r#"version = 2
root = "{folder}/containerd"
state = "{folder}/run"
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  disable_apparmor = true
  # Without CAP_SYS_RESOURCE, no process may get a lower OOM score than its parent.
  restrict_oom_score_adj = true
  disable_hugetlb_controller = true
  tolerate_missing_hugetlb_controller = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"#
        )
    }

    /// Returns the configuration file of the kubelet.
    pub(super) fn kubelet_config(&self, plane: &ControlPlane) -> serde_json::Value {
        let pki = |name: &str| plane.authority().path(name);
        let name = self.name();
        json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": node_address(self.number),
            "authentication": {
                "anonymous": { "enabled": false },
                "webhook": { "enabled": true },
                "x509": { "clientCAFile": pki("ca.crt") },
            },
            "authorization": { "mode": "Webhook" },
            "tlsCertFile": pki(&format!("{name}-serving.crt")),
            "tlsPrivateKeyFile": pki(&format!("{name}-serving.key")),
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": format!("/{}", self.cgroup()),
            "failSwapOn": false,
            "failCgroupV1": false,
            "containerRuntimeEndpoint": format!("unix://{}", self.socket().display()),
            "clusterDNS": [family().plane],
            "clusterDomain": "cluster.local",
            "resolvConf": self.folder.join("resolv.conf"),
            // Never evict or delete images for disk space: there is no registry to pull them from.
            "evictionHard": {
                "memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%",
            },
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            // With the controllers' grace period of 10 s, a dead node is detected within seconds.
            "nodeStatusUpdateFrequency": "2s",
            "nodeLeaseDurationSeconds": 8,
            "syncFrequency": "10s",
            "volumePluginDir": self.folder.join("volume-plugins"),
        })
    }
}

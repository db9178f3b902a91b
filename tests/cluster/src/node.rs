//! A node with a separate kubelet, containerd and kube-proxy, in separate network and mount
//! namespaces and with a separate root in every cgroup hierarchy.

mod config;

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};

use crate::certificates::KeyUsage;
use crate::error::{Error, WithPath, run};
use crate::network::{family, node_address, node_namespace};
use crate::{ControlPlane, programs, wait_until};

/// Directories of the node, and the paths at which the node sees them. These are fixed paths
/// (device plugins), and paths where two kubelets would interfere (each removes logs of unknown
/// pods).
const NODE_FOLDERS: [(&str, &str); 4] = [
    ("kubelet", "/var/lib/kubelet"),
    ("log", "/var/log"),
    ("cni-state", "/var/lib/cni"),
    ("run-containerd", "/run/containerd"),
];

/// A node by its number, with its state directory.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) number: usize,
    folder: PathBuf,
}

impl Node {
    pub(crate) fn new(number: usize, cluster: &Path) -> Self {
        Self { number, folder: cluster.join(format!("node-{number}")) }
    }

    /// Kubernetes name of the node.
    pub(crate) fn name(&self) -> String {
        format!("node-{}", self.number)
    }

    fn cgroup(&self) -> String {
        format!("stoker-node-{}", self.number)
    }

    /// Name of one of the node's servers.
    pub(crate) fn server(&self, name: &str) -> String {
        format!("{}-{name}", self.name())
    }

    fn socket(&self) -> PathBuf {
        self.folder.join("containerd.sock")
    }

    /// Directory in which the kubelet discovers device plugins.
    pub(crate) fn device_plugins(&self) -> PathBuf {
        self.folder.join("kubelet/device-plugins")
    }

    /// File that the fake GPU plugin reads.
    pub(crate) fn devices(&self) -> PathBuf {
        self.folder.join("gpus")
    }

    /// Creates directories, certificates, cgroups and the mount namespace. Called once.
    pub(crate) fn prepare(&self, plane: &ControlPlane) -> Result<(), Error> {
        for name in ["kubelet/device-plugins", "cni", "containerd", "run"] {
            let path = self.folder.join(name);
            std::fs::create_dir_all(&path).with_path(&path)?;
        }
        let name = self.name();
        let names = [format!("DNS:{name}"), format!("IP:{}", node_address(self.number))];
        let subject = format!("/O=system:nodes/CN=system:node:{name}");
        let authority = plane.authority();
        authority.issue(&name, &subject, KeyUsage::Client, &[])?;
        authority.issue(&format!("{name}-serving"), &subject, KeyUsage::Server, &names)?;
        self.write("resolv.conf", "search .\n")?;
        self.write("cni/10-pods.conflist", &self.cni().to_string())?;
        self.write("containerd.toml", &self.containerd_config())?;
        self.write("kubelet.json", &self.kubelet_config(plane).to_string())?;
        self.make_cgroups()?;
        self.make_mount_namespace()
    }

    fn write(&self, name: &str, text: &str) -> Result<(), Error> {
        let path = self.folder.join(name);
        std::fs::write(&path, text).with_path(&path)
    }

    fn make_cgroups(&self) -> Result<(), Error> {
        for hierarchy in hierarchies() {
            let path = hierarchy.join(self.cgroup());
            std::fs::create_dir_all(&path).with_path(&path)?;
            // A new cpuset of cgroup version 1 has no CPUs and accepts no processes.
            for name in ["cpuset.cpus", "cpuset.mems"] {
                if let Ok(all) = std::fs::read_to_string(hierarchy.join(name)) {
                    let path = path.join(name);
                    std::fs::write(&path, all.trim()).with_path(&path)?;
                }
            }
        }
        Ok(())
    }

    /// Cgroups of this node, one per hierarchy.
    pub(crate) fn cgroups(&self) -> Vec<PathBuf> {
        hierarchies().into_iter().map(|root| root.join(self.cgroup())).collect()
    }

    /// Creates the mount namespace, in which [`NODE_FOLDERS`] paths are the node's directories.
    fn make_mount_namespace(&self) -> Result<(), Error> {
        let handle = self.mount_namespace();
        let folder = self.folder.join("mount");
        std::fs::create_dir_all(&folder).with_path(&folder)?;
        // A mount namespace can be bound only to a file on a private mount.
        run(Command::new("mount").arg("--bind").args([&folder, &folder]))?;
        run(Command::new("mount").arg("--make-private").arg(&folder))?;
        std::fs::write(&handle, "").with_path(&handle)?;
        let mut command = Command::new("unshare");
        command.arg(format!("--mount={}", handle.display())).arg("--propagation=private");
        let script = r#"while [ $# -gt 0 ]; do mount --bind "$1" "$2"; shift 2; done"#;
        command.args(["sh", "-ec", script, "sh"]);
        for (source, target) in NODE_FOLDERS {
            let source = self.folder.join(source);
            std::fs::create_dir_all(&source).with_path(&source)?;
            std::fs::create_dir_all(target).with_path(target)?;
            command.args([source.as_path(), Path::new(target)]);
        }
        run(&mut command).map(drop)
    }

    fn mount_namespace(&self) -> PathBuf {
        self.folder.join("mount/namespace")
    }

    /// Starts containerd, imports images, and starts the kubelet and kube-proxy.
    pub(crate) fn start(&self, plane: &ControlPlane, images: &[PathBuf]) -> Result<(), Error> {
        let mut containerd = self.inside("containerd");
        containerd.arg("--config").arg(self.folder.join("containerd.toml"));
        plane.servers().start(&self.server("containerd"), containerd)?;
        wait_until("containerd answers", || {
            let check = plane.servers().check(&self.server("containerd"));
            check.map_err(|error| error.to_string())?;
            run(self.ctr().arg("version")).map_err(|error| error.to_string())
        })?;
        for image in images {
            self.import(image)?;
        }
        self.start_kubelet(plane)?;
        let name = self.name();
        let mut proxy =
            programs::inside(Some(&node_namespace(self.number)), programs::built("kube-proxy")?);
        let kubeconfig = plane.component_kubeconfig("kube-proxy")?;
        proxy.arg(format!("--kubeconfig={}", kubeconfig.display()));
        proxy.args([
            format!("--hostname-override={name}"),
            format!("--cluster-cidr={}", family().pods),
            "--proxy-mode=iptables".to_string(),
            "--conntrack-max-per-core=0".to_string(),
        ]);
        plane.servers().start(&self.server("kube-proxy"), proxy)
    }

    fn start_kubelet(&self, plane: &ControlPlane) -> Result<(), Error> {
        let name = self.name();
        let kubeconfig = plane.component_kubeconfig(&name)?;
        let mut kubelet = self.inside(programs::built("kubelet")?);
        kubelet.args([
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--config={}", self.folder.join("kubelet.json").display()),
            format!("--cert-dir={}", self.folder.join("pki").display()),
            format!("--hostname-override={name}"),
            format!("--node-ip={}", node_address(self.number)),
        ]);
        plane.servers().start(&self.server("kubelet"), kubelet)
    }

    /// Waits until the API server reports the node as ready.
    pub(crate) fn wait_ready(&self, plane: &ControlPlane) -> Result<(), Error> {
        wait_until(&format!("{} is ready", self.name()), || {
            for name in ["containerd", "kube-proxy"] {
                let check = plane.servers().check(&self.server(name));
                check.map_err(|error| error.to_string())?;
            }
            let check = plane.servers().check(&self.server("kubelet"));
            if let Err(error) = check {
                // Containerd may answer before its CRI plugin is initialized, and then the kubelet
                // exits. A service manager would restart it, too.
                self.start_kubelet(plane).map_err(|error| error.to_string())?;
                return Err(error.to_string());
            }
            // The condition may date from before a restart, so ask the kubelet itself too.
            let path = format!("/api/v1/nodes/{}/proxy/healthz", self.name());
            plane.kubectl(&["get", "--raw", &path]).map_err(|error| error.to_string())?;
            let node = plane.get(&["node", &self.name()]).map_err(|error| error.to_string())?;
            let ready = |condition: &&serde_json::Value| condition["type"] == "Ready";
            let conditions = node["status"]["conditions"].as_array();
            let ready = conditions.and_then(|conditions| conditions.iter().find(ready));
            match ready {
                Some(condition) if condition["status"] == "True" => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
    }

    /// Imports an image archive, and replaces an existing image.
    pub(crate) fn import(&self, archive: &Path) -> Result<(), Error> {
        run(self.ctr().args(["images", "import"]).arg(archive)).map(drop)
    }

    fn ctr(&self) -> Command {
        let mut command = Command::new("ctr");
        command.arg("--address").arg(self.socket()).args(["--namespace", "k8s.io"]);
        command
    }

    /// Kills the kubelet, containerd, kube-proxy and all containers at once, like a power failure.
    pub(crate) fn kill(&self, plane: &ControlPlane) {
        for name in ["kubelet", "containerd", "kube-proxy", "fake-gpu"] {
            plane.servers().kill(&self.server(name));
        }
        // A killed process may have started another one before.
        loop {
            let pids = [self.in_cgroups(), self.shims()].concat();
            if pids.is_empty() {
                return;
            }
            for pid in pids {
                let _ = kill_process(pid, Signal::KILL);
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    /// Processes in this node's cgroups, except zombies.
    fn in_cgroups(&self) -> Vec<Pid> {
        let cgroups = self.cgroups();
        let mut pids: Vec<_> = cgroups.iter().flat_map(|path| processes_under(path)).collect();
        pids.retain(|pid| !words_of(*pid).is_empty());
        pids
    }

    /// Processes with this program name in this node's containers.
    pub(crate) fn processes(&self, program: &str) -> Vec<Pid> {
        let is_program = |pid: &Pid| {
            let words = words_of(*pid);
            let first = words.split(' ').next().unwrap_or_default();
            Path::new(first).file_name().is_some_and(|name| name == program)
        };
        let mut processes = self.in_cgroups();
        processes.retain(is_program);
        // Each cgroup hierarchy lists them once.
        processes.sort_by_key(|pid| pid.as_raw_nonzero());
        processes.dedup();
        processes
    }

    /// Shims of this node's containers, which run outside its cgroups.
    fn shims(&self) -> Vec<Pid> {
        let socket = self.socket();
        let socket = socket.to_string_lossy();
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| pid(entry.file_name().to_str()?));
        let is_shim = |pid: &Pid| {
            let words = words_of(*pid);
            words.contains("containerd-shim") && words.contains(socket.as_ref())
        };
        pids.filter(is_shim).collect()
    }

    /// Returns a command in the node's namespaces.
    fn inside(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", node_namespace(self.number)));
        command.arg(format!("--mount={}", self.mount_namespace().display()));
        command.arg("--").arg(program);
        command
    }
}

/// Roots of the machine's cgroup hierarchies: one of version 2, or one per controller.
fn hierarchies() -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    if root.join("cgroup.controllers").exists() {
        return vec![root.to_path_buf()];
    }
    let entries = std::fs::read_dir(root).into_iter().flatten().flatten();
    // Skip symbolic links, which are second names of the same hierarchies.
    let is_folder = |entry: &std::fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
    entries.filter(is_folder).map(|entry| entry.path()).collect()
}

fn processes_under(cgroup: &Path) -> Vec<Pid> {
    let listed = std::fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    let mut pids: Vec<_> = listed.lines().filter_map(pid).collect();
    let entries = std::fs::read_dir(cgroup).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        pids.extend(processes_under(&entry.path()));
    }
    pids
}

fn pid(text: &str) -> Option<Pid> {
    text.parse().ok().and_then(Pid::from_raw)
}

/// Command line of a process; empty once the process has ended.
fn words_of(pid: Pid) -> String {
    let path = format!("/proc/{}/cmdline", pid.as_raw_nonzero());
    let words = std::fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&words).replace('\0', " ")
}

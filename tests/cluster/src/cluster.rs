//! A control plane with two nodes, DNS, fake GPUs, and an S3 server.

use std::ops::Deref;
use std::path::Path;
use std::sync::atomic::{AtomicU16, Ordering};

use rustix::process::Pid;

use crate::control_plane::ListenAddrs;
use crate::error::{Error, WithPath, run};
use crate::network::{self, PLANE, family, with_port};
use crate::node::Node;
use crate::ports::free_ports;
use crate::servers::Servers;
use crate::{ControlPlane, Options, S3, programs, s3, wait_until};

const API_PORT: u16 = 6443;
const NODES: [usize; 2] = [1, 2];

/// First port of [`Cluster::expose`].
const EXPOSED_PORTS: u16 = 20000;

/// Resource of the fake GPUs that [`Cluster::gpus`] adds to a node.
const GPU: &str = "nvidia.com/gpu";

/// A cluster with two nodes, `node-1` and `node-2`, in separate network namespaces. It needs root.
/// Only one can run on a machine: a second process waits until the first has ended its cluster.
///
/// It derefs to [`ControlPlane`] and [`Client`](crate::Client); its kubeconfig connects through
/// 127.0.0.1. It ends when it is dropped and when its process dies.
#[derive(Debug)]
pub struct Cluster {
    plane: ControlPlane,
    nodes: Vec<Node>,
    s3: S3,
    next_exposed_port: AtomicU16,
}

impl Deref for Cluster {
    type Target = ControlPlane;

    fn deref(&self) -> &ControlPlane {
        &self.plane
    }
}

impl Cluster {
    /// Starts the cluster and waits until both nodes, DNS, and S3 with its bucket are ready.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] if the machine lacks a program or right, [`Error::Kept`] if a kept
    /// cluster exists; otherwise the error of a server.
    pub fn two_nodes() -> Result<Self, Error> {
        Self::two_nodes_with(false)
    }

    /// Same as [`Cluster::two_nodes`]. With `keep`, the cluster outlives its process.
    ///
    /// # Errors
    ///
    /// Same as [`Cluster::two_nodes`].
    pub fn two_nodes_with(keep: bool) -> Result<Self, Error> {
        programs::require_node_programs()?;
        programs::weed()?;
        let servers = Servers::in_nodes_folder(keep || crate::keep())?;
        let folder = servers.folder().to_path_buf();
        let nodes: Vec<_> = NODES.iter().map(|number| Node::new(*number, &folder)).collect();
        write_cgroup_list(&folder, &nodes)?;
        network::create_control_plane_network(&folder, &NODES)?;
        let [api, s3_local] = free_ports()?;
        let addrs = ListenAddrs {
            namespace: Some(PLANE.to_string()),
            address: family().plane.to_string(),
            api_port: API_PORT,
            etcd_port: 2379,
            peer_port: 2380,
            local_port: api,
        };
        let plane = ControlPlane::new(servers, addrs)?;
        let this = Self {
            plane,
            nodes,
            s3: S3::new(s3_local),
            next_exposed_port: AtomicU16::new(EXPOSED_PORTS),
        };
        this.forward_port("api", api, ("127.0.0.1", API_PORT))?;
        this.forward_port("s3", s3_local, (family().plane, s3::PORT))?;
        this.start()?;
        Ok(this)
    }

    fn start(&self) -> Result<(), Error> {
        for node in &self.nodes {
            network::create_node_network(node.number, &NODES)?;
            node.prepare(&self.plane)?;
        }
        let images = [programs::built("pause.tar")?, programs::built("test.tar")?];
        std::thread::scope(|scope| {
            let options = Options { controllers: true, scheduler: true, keep: false };
            let plane = scope.spawn(move || self.plane.start_servers(options));
            let s3 = scope.spawn(|| self.start_s3());
            let starts = self.nodes.iter().map(|node| {
                let images = &images;
                scope.spawn(move || node.start(&self.plane, images))
            });
            let starts: Vec<_> = starts.collect();
            starts.into_iter().try_for_each(joined)?;
            joined(plane)?;
            self.start_dns()?;
            joined(s3)
        })?;
        self.nodes.iter().try_for_each(|node| node.wait_ready(&self.plane))
    }

    /// S3 server of the cluster.
    pub fn s3(&self) -> &S3 {
        &self.s3
    }

    /// Starts the S3 server again, with its previous objects.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] if it is not ready within three minutes.
    pub fn start_s3(&self) -> Result<(), Error> {
        self.s3.start(&self.plane)
    }

    /// Kills the S3 server.
    pub fn stop_s3(&self) {
        S3::stop(&self.plane);
    }

    /// Imports an image archive, as made by tests/cluster/images/make-image, into both nodes. Pods
    /// use the image with `imagePullPolicy: Never` or `IfNotPresent`.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`] if containerd rejects it.
    pub fn import_image(&self, archive: &Path) -> Result<(), Error> {
        self.nodes.iter().try_for_each(|node| node.import(archive))
    }

    /// Gives a node (1 or 2) this number of healthy GPUs, from `gpu-0` on, and waits until pods can
    /// request them.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] if the kubelet does not register them.
    ///
    /// # Panics
    ///
    /// If the node does not exist.
    pub fn gpus(&self, node: usize, count: usize) -> Result<(), Error> {
        let node = self.node(node);
        write_devices(node, count, &[])?;
        if !self.plane.servers().has(&node.server("fake-gpu")) {
            self.start_gpus(node)?;
        }
        self.wait_gpus(node, count)
    }

    /// Makes these GPUs of a node unhealthy and all others healthy, and waits until the node
    /// reports it.
    ///
    /// # Errors
    ///
    /// Same as [`Cluster::gpus`].
    ///
    /// # Panics
    ///
    /// Same as [`Cluster::gpus`].
    pub fn set_unhealthy_gpus(&self, node: usize, unhealthy: &[&str]) -> Result<(), Error> {
        let node = self.node(node);
        let path = node.devices();
        let count = std::fs::read_to_string(&path).with_path(&path)?.lines().count();
        write_devices(node, count, unhealthy)?;
        self.wait_gpus(node, count - unhealthy.len())
    }

    fn start_gpus(&self, node: &Node) -> Result<(), Error> {
        let mut command = std::process::Command::new(programs::built("fake-gpu")?);
        command.args([node.device_plugins(), node.devices()]);
        self.plane.servers().start(&node.server("fake-gpu"), command)
    }

    fn wait_gpus(&self, node: &Node, healthy: usize) -> Result<(), Error> {
        wait_until(&format!("{} has {healthy} healthy GPUs", node.name()), || {
            let node = self.get(&["node", &node.name()]).map_err(|error| error.to_string())?;
            let allocatable = &node["status"]["allocatable"][GPU];
            let count = allocatable.as_str().and_then(|count| count.parse().ok());
            if count == Some(healthy) { Ok(()) } else { Err(allocatable.to_string()) }
        })
    }

    /// Simulates a power failure of a node: its link goes down, and all its processes and
    /// containers are killed at once. The control plane detects it after 10 s.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`] if the link cannot be taken down.
    ///
    /// # Panics
    ///
    /// If the node does not exist.
    pub fn kill_node(&self, node: usize) -> Result<(), Error> {
        network::link_down(node)?;
        self.node(node).kill(&self.plane);
        Ok(())
    }

    /// Starts a killed node again, with its images and GPUs, and waits until it is ready.
    ///
    /// # Errors
    ///
    /// Same as [`Cluster::two_nodes`].
    ///
    /// # Panics
    ///
    /// If the node does not exist.
    pub fn restart_node(&self, node: usize) -> Result<(), Error> {
        network::link_up(node, &NODES)?;
        let node = self.node(node);
        node.start(&self.plane, &[])?;
        if node.devices().exists() {
            self.start_gpus(node)?;
        }
        node.wait_ready(&self.plane)
    }

    /// Disconnects a node from the network. Its processes continue. [`Cluster::reconnect_node`]
    /// undoes it.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`] if the link cannot be taken down.
    pub fn disconnect_node(&self, node: usize) -> Result<(), Error> {
        network::link_down(node)
    }

    /// Reconnects a node.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`] if the link cannot be brought up.
    pub fn reconnect_node(&self, node: usize) -> Result<(), Error> {
        network::link_up(node, &NODES)
    }

    /// Rejects every TCP connection to a port that crosses a node, including established ones, like
    /// a stopped server. [`Cluster::accept_port`] undoes it.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`] if iptables fails.
    pub fn reject_port(&self, port: u16) -> Result<(), Error> {
        NODES.iter().try_for_each(|node| network::reject_port(*node, port))
    }

    /// Accepts connections to a port that [`Cluster::reject_port`] rejects.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`] if the port was not rejected.
    pub fn accept_port(&self, port: u16) -> Result<(), Error> {
        NODES.iter().try_for_each(|node| network::accept_port(*node, port))
    }

    /// Processes with this program name in the containers of all nodes.
    pub fn processes(&self, program: &str) -> Vec<Pid> {
        self.nodes.iter().flat_map(|node| node.processes(program)).collect()
    }

    /// Fails with the last log lines if a server of the cluster exited unexpectedly.
    ///
    /// # Errors
    ///
    /// [`Error::ServerExited`] for the first such server.
    pub fn check(&self) -> Result<(), Error> {
        self.plane.servers().check_all()
    }

    /// Makes an address of the cluster, such as a pod's, reachable from this process. Returns the
    /// port of 127.0.0.1 that leads there. Service addresses are reachable only from nodes.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the forwarder cannot be started.
    pub fn forward(&self, host: &str, port: u16) -> Result<u16, Error> {
        let [local] = free_ports()?;
        self.forward_port(&format!("forward-{local}"), local, (host, port))?;
        Ok(local)
    }

    /// Makes a port of 127.0.0.1 on this machine reachable from pods. Returns the address inside
    /// the cluster, such as `172.30.0.1:20000`.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the forwarder cannot be started.
    pub fn expose(&self, port: u16) -> Result<String, Error> {
        let inner = self.next_exposed_port.fetch_add(1, Ordering::Relaxed);
        let name = format!("expose-{inner}");
        let socket = self.folder().join(format!("{name}.sock"));
        let inside = (Some(PLANE), (family().plane, inner));
        let commands = network::forwarder_commands(&socket, inside, (None, ("127.0.0.1", port)));
        self.start_forwarder(&name, &socket, (Some(PLANE), inner), commands)?;
        Ok(with_port(family().plane, inner))
    }

    fn forward_port(&self, name: &str, local: u16, to: (&str, u16)) -> Result<(), Error> {
        let socket = self.folder().join(format!("{name}.sock"));
        let outside = (None, ("127.0.0.1", local));
        self.start_forwarder(
            name,
            &socket,
            (None, local),
            network::forwarder_commands(&socket, outside, (Some(PLANE), to)),
        )
    }

    fn start_forwarder(
        &self,
        name: &str,
        socket: &Path,
        (namespace, port): (Option<&str>, u16),
        (near, far): (std::process::Command, std::process::Command),
    ) -> Result<(), Error> {
        self.plane.servers().start(&format!("{name}-far"), far)?;
        self.plane.servers().start(&format!("{name}-near"), near)?;
        wait_until(&format!("the forwarder {name} is ready"), || {
            let near = self.plane.servers().check(&format!("{name}-near"));
            near.map_err(|error| error.to_string())?;
            let listens = network::is_listening(namespace, port);
            match socket.exists() && listens.map_err(|error| error.to_string())? {
                true => Ok(()),
                false => Err("not listening".to_string()),
            }
        })
    }

    /// Starts CoreDNS at the address that kubelets give to pods. It resolves only the cluster's
    /// names, without a cache, so a new pod's name resolves at once.
    fn start_dns(&self) -> Result<(), Error> {
        let kubeconfig = self.plane.component_kubeconfig("coredns")?;
        let plane = family().plane;
        let ready = with_port(plane, 8053);
        let path = self.folder().join("Corefile");
        let text = format!(
            ".:53 {{\n  bind {plane}\n  errors\n  ready {ready}\n  kubernetes \
             cluster.local in-addr.arpa ip6.arpa {{\n    kubeconfig {}\n    ttl 1\n  }}\n}}\n",
            kubeconfig.display()
        );
        std::fs::write(&path, text).with_path(&path)?;
        let mut command = programs::inside(Some(PLANE), programs::built("coredns")?);
        command.arg("-conf").arg(&path);
        self.plane.servers().start("coredns", command)?;
        let ask = "exec 3<>/dev/tcp/$0/8053 && printf 'GET /ready HTTP/1.0\\r\\n\\r\\n' >&3 && \
                   grep -q OK <&3";
        wait_until("CoreDNS is ready", || {
            self.plane.servers().check("coredns").map_err(|error| error.to_string())?;
            let mut request = programs::inside(Some(PLANE), "bash");
            request.args(["-c", ask, plane]);
            run(&mut request).map_err(|error| error.to_string())
        })
        .map(drop)
    }

    fn node(&self, number: usize) -> &Node {
        let node = self.nodes.iter().find(|node| node.number == number);
        node.unwrap_or_else(|| panic!("node {number} does not exist; nodes: {NODES:?}"))
    }
}

fn joined(thread: std::thread::ScopedJoinHandle<'_, Result<(), Error>>) -> Result<(), Error> {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Writes the nodes' cgroups to a file, for the reaper.
fn write_cgroup_list(folder: &Path, nodes: &[Node]) -> Result<(), Error> {
    let all = nodes.iter().flat_map(Node::cgroups);
    let text: String = all.map(|path| format!("{}\n", path.display())).collect();
    let path = folder.join("cgroups");
    std::fs::write(&path, text).with_path(&path)
}

fn write_devices(node: &Node, count: usize, unhealthy: &[&str]) -> Result<(), Error> {
    let line = |number: usize| {
        let name = format!("gpu-{number}");
        let health = if unhealthy.contains(&name.as_str()) { " sick" } else { "" };
        format!("{name}{health}\n")
    };
    let text: String = (0..count).map(line).collect();
    // Replace the file atomically: the device plugin reads it ten times per second.
    let (part, path) = (node.devices().with_extension("part"), node.devices());
    std::fs::write(&part, text).with_path(&part)?;
    std::fs::rename(&part, &path).with_path(&path)
}

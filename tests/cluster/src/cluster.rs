//! A control plane with two nodes, DNS, GPUs that do not exist, and an S3 server.

use std::ops::Deref;
use std::path::Path;
use std::sync::atomic::{AtomicU16, Ordering};

use rustix::process::Pid;

use crate::control_plane::Place;
use crate::error::{At, Error, run};
use crate::network::{self, PLANE, PLANE_ADDRESS};
use crate::node::Node;
use crate::ports::free_ports;
use crate::servers::Servers;
use crate::{ControlPlane, Options, S3, programs, s3, wait_until};

const API_PORT: u16 = 6443;
const NODES: [usize; 2] = [1, 2];

/// Where [`Cluster::expose`] begins to count.
const EXPOSED_PORTS: u16 = 20000;

/// How long CoreDNS, a kubelet's look at its devices and the like may take.
const SOON_SECONDS: u64 = 60;

/// What a pod can ask for, once [`Cluster::gpus`] gave it to a node.
const GPU: &str = "nvidia.com/gpu";

/// Two nodes, `node-1` and `node-2`, in network namespaces of their own. There is room for one on a
/// machine: a second process waits until the first is done with it. It needs root.
///
/// What [`ControlPlane`] and [`Client`](crate::Client) can do, it can: its kubeconfig leads through
/// 127.0.0.1. It ends when it is dropped, and when its process dies, however.
#[derive(Debug)]
pub struct Cluster {
    plane: ControlPlane,
    nodes: Vec<Node>,
    s3: S3,
    ways: AtomicU16,
}

impl Deref for Cluster {
    type Target = ControlPlane;

    fn deref(&self) -> &ControlPlane {
        &self.plane
    }
}

impl Cluster {
    /// Starts the cluster: both nodes are ready, DNS answers, S3 has its bucket.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] if the machine lacks something, [`Error::Kept`] if one is kept; else what
    /// the servers say.
    pub fn two_nodes() -> Result<Self, Error> {
        Self::two_nodes_with(false)
    }

    /// As [`Cluster::two_nodes`]; if `keep`, it runs on when its process ends.
    ///
    /// # Errors
    ///
    /// As [`Cluster::two_nodes`].
    pub fn two_nodes_with(keep: bool) -> Result<Self, Error> {
        programs::need_nodes()?;
        programs::weed()?;
        let servers = Servers::in_only_folder(keep || crate::keep())?;
        let folder = servers.folder().to_path_buf();
        let nodes: Vec<_> = NODES.iter().map(|it| Node::new(*it, &folder)).collect();
        note_cgroups(&folder, &nodes)?;
        network::make_plane(&folder, &NODES)?;
        let [api, s3_local] = free_ports()?;
        let place = Place {
            namespace: Some(PLANE.to_string()),
            address: PLANE_ADDRESS.to_string(),
            api_port: API_PORT,
            etcd_port: 2379,
            peer_port: 2380,
            local_port: api,
        };
        let plane = ControlPlane::new(servers, place)?;
        let this =
            Self { plane, nodes, s3: S3::new(s3_local), ways: AtomicU16::new(EXPOSED_PORTS) };
        this.way_in("api", api, ("127.0.0.1", API_PORT))?;
        this.way_in("s3", s3_local, (PLANE_ADDRESS, s3::PORT))?;
        this.start()?;
        Ok(this)
    }

    fn start(&self) -> Result<(), Error> {
        for node in &self.nodes {
            network::make_node(node.number, &NODES)?;
            node.prepare(&self.plane)?;
        }
        let images = [programs::built("pause.tar")?, programs::built("test.tar")?];
        std::thread::scope(|scope| {
            let options = Options { controllers: true, scheduler: true, keep: false };
            let plane = scope.spawn(move || self.plane.start_servers(options));
            let s3 = scope.spawn(|| self.start_s3());
            let starts = self.nodes.iter().map(|it| {
                let images = &images;
                scope.spawn(move || it.start(&self.plane, images))
            });
            let starts: Vec<_> = starts.collect();
            starts.into_iter().try_for_each(joined)?;
            joined(plane)?;
            self.start_dns()?;
            joined(s3)
        })?;
        self.nodes.iter().try_for_each(|it| it.wait_ready(&self.plane))
    }

    /// The S3 server.
    pub fn s3(&self) -> &S3 {
        &self.s3
    }

    /// Starts the S3 server again, with the objects it had.
    ///
    /// # Errors
    ///
    /// [`Error::Deadline`] if it does not work within three minutes.
    pub fn start_s3(&self) -> Result<(), Error> {
        self.s3.start(&self.plane)
    }

    /// Kills the S3 server.
    pub fn stop_s3(&self) {
        S3::stop(&self.plane);
    }

    /// Imports an image archive, as tests/cluster/images/make-image makes it, into both nodes. Pods
    /// name it with `imagePullPolicy: Never` or `IfNotPresent`.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`] if containerd refuses it.
    pub fn import_image(&self, archive: &Path) -> Result<(), Error> {
        self.nodes.iter().try_for_each(|it| it.import(archive))
    }

    /// Gives a node (1 or 2) so many healthy GPUs, `gpu-0` and on, and waits until pods can ask for
    /// them.
    ///
    /// # Errors
    ///
    /// [`Error::Deadline`] if the kubelet does not take them.
    ///
    /// # Panics
    ///
    /// If there is no node of that number.
    pub fn gpus(&self, node: usize, count: usize) -> Result<(), Error> {
        let node = self.node(node);
        write_devices(node, count, &[])?;
        if !self.plane.servers().has(&node.server("fake-gpu")) {
            self.start_gpus(node)?;
        }
        self.wait_gpus(node, count)
    }

    /// Makes GPUs of a node sick, by name, and all others well; waits until the node says so.
    ///
    /// # Errors
    ///
    /// As [`Cluster::gpus`].
    ///
    /// # Panics
    ///
    /// As [`Cluster::gpus`].
    pub fn set_sick(&self, node: usize, sick: &[&str]) -> Result<(), Error> {
        let node = self.node(node);
        let path = node.devices();
        let count = std::fs::read_to_string(&path).at(&path)?.lines().count();
        write_devices(node, count, sick)?;
        self.wait_gpus(node, count - sick.len())
    }

    fn start_gpus(&self, node: &Node) -> Result<(), Error> {
        let mut command = std::process::Command::new(programs::built("fake-gpu")?);
        command.args([node.device_plugins(), node.devices()]);
        self.plane.servers().start(&node.server("fake-gpu"), command)
    }

    fn wait_gpus(&self, node: &Node, healthy: usize) -> Result<(), Error> {
        wait_until(&format!("{} has {healthy} healthy GPUs", node.name()), SOON_SECONDS, || {
            let found = self.get(&["node", &node.name()]).map_err(|it| it.to_string())?;
            let allocatable = &found["status"]["allocatable"][GPU];
            let count = allocatable.as_str().and_then(|it| it.parse().ok());
            if count == Some(healthy) { Ok(()) } else { Err(allocatable.to_string()) }
        })
    }

    /// A node dies: its link goes down, and all its processes and containers are killed at once. The
    /// control plane finds out after 10 s.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`] if its link cannot be taken down.
    ///
    /// # Panics
    ///
    /// If there is no node of that number.
    pub fn kill_node(&self, node: usize) -> Result<(), Error> {
        network::link_down(node)?;
        self.node(node).kill(&self.plane);
        Ok(())
    }

    /// A node that was killed comes back, with its images and GPUs; returns when it is ready.
    ///
    /// # Errors
    ///
    /// As [`Cluster::two_nodes`].
    ///
    /// # Panics
    ///
    /// If there is no node of that number.
    pub fn revive_node(&self, node: usize) -> Result<(), Error> {
        network::link_up(node, &NODES)?;
        let node = self.node(node);
        node.start(&self.plane, &[])?;
        if node.devices().exists() {
            self.start_gpus(node)?;
        }
        node.wait_ready(&self.plane)
    }

    /// Cuts a node off the network; all its processes run on. [`Cluster::join_node`] undoes it.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`] if its link cannot be taken down.
    pub fn cut_node(&self, node: usize) -> Result<(), Error> {
        network::link_down(node)
    }

    /// Connects a node that was cut off.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`] if its link cannot be brought up.
    pub fn join_node(&self, node: usize) -> Result<(), Error> {
        network::link_up(node, &NODES)
    }

    /// Rejects every TCP connection to a port that crosses a node, established ones too, as a stopped server does.
    /// [`Cluster::accept_port`] undoes it.
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

    /// Processes in containers of all nodes whose program has this name.
    pub fn processes(&self, program: &str) -> Vec<Pid> {
        self.nodes.iter().flat_map(|node| node.processes(program)).collect()
    }

    /// Fails if a server of the cluster exited by itself, with the end of its log.
    ///
    /// # Errors
    ///
    /// [`Error::Ended`] for the first such server.
    pub fn check(&self) -> Result<(), Error> {
        self.plane.servers().check_all()
    }

    /// Lets this process reach an address of the cluster, such as a pod's: gives the port of
    /// 127.0.0.1 that leads there. Services' addresses are the nodes' alone.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if it cannot be set up.
    pub fn forward(&self, host: &str, port: u16) -> Result<u16, Error> {
        let [local] = free_ports()?;
        self.way_in(&format!("forward-{local}"), local, (host, port))?;
        Ok(local)
    }

    /// Lets pods reach a port of 127.0.0.1 of this machine: gives the address that leads there from
    /// inside, such as `172.30.0.1:20000`.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if it cannot be set up.
    pub fn expose(&self, port: u16) -> Result<String, Error> {
        let inner = self.ways.fetch_add(1, Ordering::Relaxed);
        let name = format!("expose-{inner}");
        let socket = self.folder().join(format!("{name}.sock"));
        let inside = (Some(PLANE), (PLANE_ADDRESS, inner));
        let commands = network::way(&socket, inside, (None, ("127.0.0.1", port)));
        self.start_way(&name, &socket, commands)?;
        Ok(format!("{PLANE_ADDRESS}:{inner}"))
    }

    fn way_in(&self, name: &str, local: u16, to: (&str, u16)) -> Result<(), Error> {
        let socket = self.folder().join(format!("{name}.sock"));
        let outside = (None, ("127.0.0.1", local));
        self.start_way(name, &socket, network::way(&socket, outside, (Some(PLANE), to)))
    }

    fn start_way(
        &self,
        name: &str,
        socket: &Path,
        (near, far): (std::process::Command, std::process::Command),
    ) -> Result<(), Error> {
        self.plane.servers().start(&format!("{name}-far"), far)?;
        self.plane.servers().start(&format!("{name}-near"), near)?;
        wait_until(&format!("the way {name} is open"), SOON_SECONDS, || {
            let near = self.plane.servers().check(&format!("{name}-near"));
            near.map_err(|it| it.to_string())?;
            if socket.exists() { Ok(()) } else { Err("no socket".to_string()) }
        })
    }

    /// CoreDNS at the address that kubelets give to pods. It knows the cluster's names and no others,
    /// and remembers nothing: a new pod's name is there at once.
    fn start_dns(&self) -> Result<(), Error> {
        let kubeconfig = self.plane.component_kubeconfig("coredns")?;
        let ready = format!("{PLANE_ADDRESS}:8053");
        let path = self.folder().join("Corefile");
        let text = format!(
            ".:53 {{\n  bind {PLANE_ADDRESS}\n  errors\n  ready {ready}\n  kubernetes cluster.local \
             in-addr.arpa {{\n    kubeconfig {}\n    ttl 1\n  }}\n}}\n",
            kubeconfig.display()
        );
        std::fs::write(&path, text).at(&path)?;
        let mut command = programs::inside(Some(PLANE), programs::built("coredns")?);
        command.arg("-conf").arg(&path);
        self.plane.servers().start("coredns", command)?;
        let ask = "exec 3<>/dev/tcp/$0/8053 && printf 'GET /ready HTTP/1.0\\r\\n\\r\\n' >&3 && grep -q OK <&3";
        wait_until("CoreDNS is ready", SOON_SECONDS, || {
            self.plane.servers().check("coredns").map_err(|it| it.to_string())?;
            let mut ask_it = programs::inside(Some(PLANE), "bash");
            ask_it.args(["-c", ask, PLANE_ADDRESS]);
            run(&mut ask_it).map_err(|it| it.to_string())
        })
        .map(drop)
    }

    fn node(&self, number: usize) -> &Node {
        let found = self.nodes.iter().find(|it| it.number == number);
        found.unwrap_or_else(|| panic!("there is no node {number}; there are {NODES:?}"))
    }
}

fn joined(thread: std::thread::ScopedJoinHandle<'_, Result<(), Error>>) -> Result<(), Error> {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Writes down which cgroups are the nodes', for what ends them.
fn note_cgroups(folder: &Path, nodes: &[Node]) -> Result<(), Error> {
    let all = nodes.iter().flat_map(Node::cgroups);
    let text: String = all.map(|it| format!("{}\n", it.display())).collect();
    let path = folder.join("cgroups");
    std::fs::write(&path, text).at(&path)
}

fn write_devices(node: &Node, count: usize, sick: &[&str]) -> Result<(), Error> {
    let line = |it: usize| {
        let name = format!("gpu-{it}");
        let health = if sick.contains(&name.as_str()) { " sick" } else { "" };
        format!("{name}{health}\n")
    };
    let text: String = (0..count).map(line).collect();
    // Whole or not at all: the stand-in reads it ten times a second.
    let (part, path) = (node.devices().with_extension("part"), node.devices());
    std::fs::write(&part, text).at(&part)?;
    std::fs::rename(&part, &path).at(&path)
}

//! Isolated network of the cluster: a namespace with a bridge for the control plane, and one per
//! node, without a route out. Unix sockets connect it to the host.
//!
//! ```text
//! test process ── 127.0.0.1:PORT ── socket file ── stoker-cp (172.30.0.1, bridge)
//!                                      ├── stoker-node-1 (172.30.0.11; pods 10.244.1.0/24)
//!                                      └── stoker-node-2 (172.30.0.12; pods 10.244.2.0/24)
//! ```

use std::path::Path;
use std::process::Command;

use crate::error::{Error, WithPath, run};
use crate::programs::inside;

/// Network namespace of the control plane.
pub(crate) const PLANE: &str = "stoker-cp";

/// Address at which pods and nodes reach the control plane.
pub(crate) const PLANE_ADDRESS: &str = "172.30.0.1";

/// CIDR of all pods.
pub(crate) const PODS: &str = "10.244.0.0/16";

/// Network namespace of a node.
pub(crate) fn node_namespace(node: usize) -> String {
    format!("stoker-node-{node}")
}

/// Address of a node.
pub(crate) fn node_address(node: usize) -> String {
    format!("172.30.0.{}", 10 + node)
}

/// CIDR of a node's pods.
pub(crate) fn pods_of(node: usize) -> String {
    format!("10.244.{node}.0/24")
}

/// Creates the control plane's namespace and bridge, after listing all namespaces in `folder`.
pub(crate) fn create_control_plane_network(folder: &Path, nodes: &[usize]) -> Result<(), Error> {
    let names = nodes.iter().map(|node| node_namespace(*node));
    let names: Vec<_> = std::iter::once(PLANE.to_string()).chain(names).collect();
    let path = folder.join("namespaces");
    std::fs::write(&path, names.join("\n") + "\n").with_path(&path)?;
    run(Command::new("ip").args(["netns", "add", PLANE]))?;
    ip(PLANE, "link set lo up")?;
    ip(PLANE, "link add bridge type bridge")?;
    ip(PLANE, &format!("addr add {PLANE_ADDRESS}/24 dev bridge"))?;
    ip(PLANE, "link set bridge up")?;
    sysctl(PLANE, "net/ipv4/ip_forward")
}

/// Creates a node's namespace on the bridge, with routes to its pods and to those of its peers.
pub(crate) fn create_node_network(node: usize, nodes: &[usize]) -> Result<(), Error> {
    let name = node_namespace(node);
    run(Command::new("ip").args(["netns", "add", &name]))?;
    ip(PLANE, &format!("link add to-{node} type veth peer name eth0 netns {name}"))?;
    ip(PLANE, &format!("link set to-{node} master bridge up"))?;
    ip(PLANE, &format!("route add {} via {}", pods_of(node), node_address(node)))?;
    ip(&name, "link set lo up")?;
    ip(&name, &format!("addr add {}/24 dev eth0", node_address(node)))?;
    sysctl(&name, "net/ipv4/ip_forward")?;
    // If the kernel supports it, let kube-proxy's rules apply to traffic on the pods' bridge.
    let _ = sysctl(&name, "net/bridge/bridge-nf-call-iptables");
    link_up(node, nodes)
}

/// Connects a node and adds its routes, which disappear when its link goes down.
pub(crate) fn link_up(node: usize, nodes: &[usize]) -> Result<(), Error> {
    let name = node_namespace(node);
    ip(&name, "link set eth0 up")?;
    ip(&name, &format!("route replace default via {PLANE_ADDRESS}"))?;
    for peer in nodes.iter().filter(|peer| **peer != node) {
        ip(&name, &format!("route replace {} via {}", pods_of(*peer), node_address(*peer)))?;
    }
    Ok(())
}

/// Disconnects a node.
pub(crate) fn link_down(node: usize) -> Result<(), Error> {
    ip(&node_namespace(node), "link set eth0 down")
}

/// Rejects TCP connections to a port, including established ones.
pub(crate) fn reject_port(node: usize, port: u16) -> Result<(), Error> {
    rule(node, "-I", port)
}

/// Undoes [`reject_port`].
pub(crate) fn accept_port(node: usize, port: u16) -> Result<(), Error> {
    rule(node, "-D", port)
}

/// Pods reach a service through the node's routing, even on the same node, so `FORWARD` applies.
fn rule(node: usize, verb: &str, port: u16) -> Result<(), Error> {
    let rule =
        format!("-w 10 {verb} FORWARD -p tcp --dport {port} -j REJECT --reject-with tcp-reset");
    run(inside(Some(&node_namespace(node)), "iptables").args(rule.split(' '))).map(drop)
}

fn ip(namespace: &str, words: &str) -> Result<(), Error> {
    run(inside(Some(namespace), "ip").args(words.split(' '))).map(drop)
}

/// Sets a network parameter to 1. Not every machine has the `sysctl` program.
fn sysctl(namespace: &str, name: &str) -> Result<(), Error> {
    let write = format!("echo 1 >/proc/sys/{name}");
    run(inside(Some(namespace), "sh").args(["-c", &write])).map(drop)
}

/// Returns whether a program listens at a TCP port of a namespace, without connecting to it.
pub(crate) fn is_listening(namespace: Option<&str>, port: u16) -> Result<bool, Error> {
    let table = run(inside(namespace, "cat").arg("/proc/net/tcp"))?;
    let port = format!(":{port:04X}");
    Ok(table.lines().any(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let (local, state) = (fields.next(), fields.nth(1));
        local.is_some_and(|local| local.ends_with(&port)) && state == Some("0A")
    }))
}

/// Returns two commands that forward connections through a Unix socket. The first listens at an
/// address in one namespace and connects to the socket. The second listens at the socket and
/// connects to an address in another namespace. A namespace of `None` is the host's.
pub(crate) fn forwarder_commands(
    socket: &Path,
    (from, listen): (Option<&str>, (&str, u16)),
    (to, connect): (Option<&str>, (&str, u16)),
) -> (Command, Command) {
    let socket = socket.display();
    let mut near = inside(from, "socat");
    near.arg(format!("TCP-LISTEN:{},bind={},reuseaddr,fork,nodelay", listen.1, listen.0));
    near.arg(format!("UNIX-CONNECT:{socket}"));
    let mut far = inside(to, "socat");
    far.arg(format!("UNIX-LISTEN:{socket},fork,mode=600,unlink-early"));
    far.arg(format!("TCP:{}:{},nodelay", connect.0, connect.1));
    (near, far)
}

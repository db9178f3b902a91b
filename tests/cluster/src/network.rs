//! Isolated network of the cluster: a namespace with a bridge for the control plane, and one per
//! node, without a route out. Unix sockets connect it to the host.
//!
//! ```text
//! test process ── 127.0.0.1:PORT ── socket file ── stoker-cp (172.30.0.1, bridge)
//!                                      ├── stoker-node-1 (172.30.0.11; pods 10.244.1.0/24)
//!                                      └── stoker-node-2 (172.30.0.12; pods 10.244.2.0/24)
//! ```
//!
//! With `STOKER_TEST_CLUSTER=ipv6`, all these addresses are of IPv6, and the namespaces have no
//! others, except 127.0.0.1.

use std::path::Path;
use std::process::Command;

use crate::error::{Error, WithPath, run};
use crate::programs::inside;

/// Network namespace of the control plane.
pub(crate) const PLANE: &str = "stoker-cp";

/// CIDRs and addresses of the cluster.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Family {
    pub(crate) is_ipv6: bool,
    /// Address at which pods and nodes reach the control plane.
    pub(crate) plane: &'static str,
    /// CIDR of all pods.
    pub(crate) pods: &'static str,
    /// CIDR of all services.
    pub(crate) services: &'static str,
    /// Address of the service of the API server.
    pub(crate) api_service: &'static str,
    /// Address that stands for all.
    pub(crate) any: &'static str,
    /// Destination of the default route.
    pub(crate) all: &'static str,
}

pub(crate) const IPV4: Family = Family {
    is_ipv6: false,
    plane: "172.30.0.1",
    pods: "10.244.0.0/16",
    services: "10.96.0.0/16",
    api_service: "10.96.0.1",
    any: "0.0.0.0",
    all: "0.0.0.0/0",
};

const IPV6: Family = Family {
    is_ipv6: true,
    plane: "fd30::1",
    pods: "fd44::/48",
    services: "fd96::/112",
    api_service: "fd96::1",
    any: "::",
    all: "::/0",
};

/// Family of the addresses in clusters with nodes.
pub(crate) fn family() -> Family {
    if crate::switch() == "ipv6" { IPV6 } else { IPV4 }
}

/// Returns an address with a port, as in URLs.
pub(crate) fn with_port(address: &str, port: u16) -> String {
    match address.contains(':') {
        true => format!("[{address}]:{port}"),
        false => format!("{address}:{port}"),
    }
}

/// Network namespace of a node.
pub(crate) fn node_namespace(node: usize) -> String {
    format!("stoker-node-{node}")
}

/// Address of a node.
pub(crate) fn node_address(node: usize) -> String {
    match family().is_ipv6 {
        true => format!("fd30::{}", 10 + node),
        false => format!("172.30.0.{}", 10 + node),
    }
}

/// CIDR of a node's pods.
pub(crate) fn pods_of(node: usize) -> String {
    match family().is_ipv6 {
        true => format!("fd44:0:0:{node}::/64"),
        false => format!("10.244.{node}.0/24"),
    }
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
    add_address(PLANE, family().plane, "bridge")?;
    ip(PLANE, "link set bridge up")?;
    forward_packets(PLANE)
}

fn add_address(namespace: &str, address: &str, device: &str) -> Result<(), Error> {
    match family().is_ipv6 {
        // No other machine can have the address, so use it without a check for duplicates.
        true => ip(namespace, &format!("addr add {address}/64 dev {device} nodad")),
        false => ip(namespace, &format!("addr add {address}/24 dev {device}")),
    }
}

/// Lets a namespace forward packets of others.
fn forward_packets(namespace: &str) -> Result<(), Error> {
    let name =
        if family().is_ipv6 { "net/ipv6/conf/all/forwarding" } else { "net/ipv4/ip_forward" };
    sysctl(namespace, name)
}

/// Creates a node's namespace on the bridge, with routes to its pods and to those of its peers.
pub(crate) fn create_node_network(node: usize, nodes: &[usize]) -> Result<(), Error> {
    let name = node_namespace(node);
    run(Command::new("ip").args(["netns", "add", &name]))?;
    ip(PLANE, &format!("link add to-{node} type veth peer name eth0 netns {name}"))?;
    ip(PLANE, &format!("link set to-{node} master bridge up"))?;
    route(PLANE, "add", &pods_of(node), &node_address(node))?;
    ip(&name, "link set lo up")?;
    add_address(&name, &node_address(node), "eth0")?;
    forward_packets(&name)?;
    // If the kernel supports it, let kube-proxy's rules apply to traffic on the pods' bridge.
    let tables = if family().is_ipv6 { "ip6tables" } else { "iptables" };
    let _ = sysctl(&name, &format!("net/bridge/bridge-nf-call-{tables}"));
    link_up(node, nodes)
}

/// Connects a node and adds its routes, which disappear when its link goes down.
pub(crate) fn link_up(node: usize, nodes: &[usize]) -> Result<(), Error> {
    let name = node_namespace(node);
    ip(&name, "link set eth0 up")?;
    // The kernel removes addresses of IPv6 with the link.
    if family().is_ipv6 {
        ip(&name, &format!("addr replace {}/64 dev eth0 nodad", node_address(node)))?;
    }
    route(&name, "replace", "default", family().plane)?;
    for peer in nodes.iter().filter(|peer| **peer != node) {
        route(&name, "replace", &pods_of(*peer), &node_address(*peer))?;
    }
    Ok(())
}

fn route(namespace: &str, verb: &str, to: &str, via: &str) -> Result<(), Error> {
    let version = if family().is_ipv6 { "-6" } else { "-4" };
    ip(namespace, &format!("{version} route {verb} {to} via {via}"))
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
    let program = if family().is_ipv6 { "ip6tables" } else { "iptables" };
    run(inside(Some(&node_namespace(node)), program).args(rule.split(' '))).map(drop)
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
    let table = run(inside(namespace, "cat").args(["/proc/net/tcp", "/proc/net/tcp6"]))?;
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
    let version = |address: &str| if address.contains(':') { 6 } else { 4 };
    let bracketed = |address: &str| match version(address) {
        6 => format!("[{address}]"),
        _ => address.to_owned(),
    };
    let mut near = inside(from, "socat");
    let (host, port) = listen;
    near.arg(format!(
        "TCP{}-LISTEN:{port},bind={},reuseaddr,fork,nodelay",
        version(host),
        bracketed(host)
    ));
    near.arg(format!("UNIX-CONNECT:{socket}"));
    let mut far = inside(to, "socat");
    far.arg(format!("UNIX-LISTEN:{socket},fork,mode=600,unlink-early"));
    let (host, port) = connect;
    far.arg(format!("TCP{}:{}:{port},nodelay", version(host), bracketed(host)));
    (near, far)
}

//! Finds the programs of a cluster: in the cache that scripts/fetch-cluster fills, and on this
//! machine.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Error;

/// Directory in the cache. Must match scripts/fetch-cluster.
const FOLDER: &str = "tools/cluster-1.36.3-1";

/// Directory of Debian's CNI plugins.
pub(crate) const CNI_PLUGINS: &str = "/usr/lib/cni";

/// Debian programs that nodes need, besides the CNI plugins.
const NODE_PROGRAMS: [&str; 9] =
    ["containerd", "ctr", "runc", "iptables", "conntrack", "socat", "ip", "nsenter", "unshare"];

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Cache directory of builds and tools. Must match scripts/env.sh.
fn cache() -> Result<PathBuf, Error> {
    variable("STOKER_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|path| path.join("stoker")))
        .or_else(|| variable("HOME").map(|path| path.join(".cache/stoker")))
        .ok_or_else(|| missing("a cache directory", "set STOKER_CACHE or HOME"))
}

pub(crate) fn missing(what: impl Into<String>, remedy: impl Into<String>) -> Error {
    Error::Missing { what: what.into(), remedy: remedy.into() }
}

/// Returns the path of a file in the cache's directory for clusters: a server, kubectl, helm, or an
/// image.
///
/// # Errors
///
/// [`Error::Missing`] if scripts/fetch-cluster has not completed.
pub(crate) fn built(name: &str) -> Result<PathBuf, Error> {
    let folder = cache()?.join(FOLDER);
    let path = folder.join(name);
    if folder.join(".complete").exists() && path.exists() {
        return Ok(path);
    }
    Err(missing(path.display().to_string(), "run scripts/fetch-cluster"))
}

/// Returns the path of etcd, kube-apiserver or kubectl, from KUBEBUILDER_ASSETS if set.
pub(crate) fn control_plane(name: &str) -> Result<PathBuf, Error> {
    let Some(folder) = variable("KUBEBUILDER_ASSETS") else {
        return built(name);
    };
    let path = folder.join(name);
    if path.exists() {
        return Ok(path);
    }
    let remedy = "put it there, or unset KUBEBUILDER_ASSETS and run scripts/fetch-cluster";
    Err(missing(path.display().to_string(), remedy))
}

/// Returns the path of the S3 server, which scripts/fetch-tools installs.
pub(crate) fn weed() -> Result<PathBuf, Error> {
    let path = cache()?.join("tools/python-5/bin/weed");
    if path.exists() {
        return Ok(path);
    }
    Err(missing(path.display().to_string(), "run scripts/fetch-tools"))
}

/// Checks that a program is in `PATH`.
pub(crate) fn require(name: &str) -> Result<(), Error> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if std::env::split_paths(&path).any(|folder| folder.join(name).exists()) {
        return Ok(());
    }
    Err(missing(format!("the program {name}"), "run scripts/fetch-cluster as root"))
}

/// Checks that this machine can run nodes: root, and the programs from Debian's packages.
///
/// # Errors
///
/// [`Error::Missing`] with the first missing item.
pub(crate) fn require_node_programs() -> Result<(), Error> {
    if !rustix::process::geteuid().is_root() {
        return Err(missing("root, for network namespaces and containers", "run as root"));
    }
    NODE_PROGRAMS.iter().try_for_each(|name| require(name))?;
    if !Path::new(CNI_PLUGINS).join("bridge").exists() {
        let what = format!("the CNI plugins in {CNI_PLUGINS}");
        return Err(missing(what, "run scripts/fetch-cluster as root"));
    }
    Ok(())
}

/// Returns a command in a network namespace, or in this process's if `None`. `nsenter` replaces
/// itself with the program, so the process ID is the program's.
pub(crate) fn inside(namespace: Option<&str>, program: impl AsRef<OsStr>) -> Command {
    let Some(namespace) = namespace else {
        return Command::new(program);
    };
    // `ip netns exec` would mount a new /sys, which hides the cgroups.
    let mut command = Command::new("nsenter");
    command.arg(format!("--net=/run/netns/{namespace}")).arg(program);
    command
}

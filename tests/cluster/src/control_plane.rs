//! etcd and the API server, optionally with the controllers and the scheduler.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::audit;
use crate::certificates::{Authority, KeyUsage};
use crate::error::{Error, WithPath};
use crate::network::{self, Family, with_port};
use crate::ports::free_ports;
use crate::servers::Servers;
use crate::{Client, Request, programs, wait_until};

/// Optional parts of a control plane.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Runs kube-controller-manager: garbage collection by owner references, deletion of
    /// namespaces, default service accounts, Jobs, endpoints, taints and eviction of dead nodes.
    pub controllers: bool,
    /// Runs kube-scheduler.
    pub scheduler: bool,
    /// Keeps the cluster running, with its directory, when it is dropped or its process ends.
    /// `STOKER_TEST_CLUSTER_KEEP=1` sets this too.
    pub keep: bool,
}

/// Addresses of the servers.
#[derive(Clone, Debug)]
pub(crate) struct ListenAddrs {
    /// Network namespace; `None` for this process's.
    pub(crate) namespace: Option<String>,
    /// Address at which other servers reach the API server.
    pub(crate) address: String,
    pub(crate) api_port: u16,
    pub(crate) etcd_port: u16,
    pub(crate) peer_port: u16,
    /// Port of 127.0.0.1 at which this process reaches the API server.
    pub(crate) local_port: u16,
}

/// A control plane on 127.0.0.1. Several can run at the same time. It ends when it is dropped and
/// when its process dies.
///
/// It derefs to [`Client`], for methods such as `kubectl`.
#[derive(Debug)]
pub struct ControlPlane {
    client: Client,
    folder: PathBuf,
    addrs: ListenAddrs,
    authority: Authority,
    servers: Mutex<Servers>,
}

impl Deref for ControlPlane {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl ListenAddrs {
    /// Family of the cluster's addresses. Without nodes, a control plane is on 127.0.0.1.
    fn family(&self) -> Family {
        if self.namespace.is_some() { network::family() } else { network::IPV4 }
    }
}

impl ControlPlane {
    /// Starts etcd and an API server without controllers, so that only the test changes objects.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] if the machine lacks a program; otherwise the error of a server.
    pub fn start() -> Result<Self, Error> {
        Self::start_with(Options::default())
    }

    /// Starts a control plane with these options.
    ///
    /// # Errors
    ///
    /// Same as [`ControlPlane::start`].
    pub fn start_with(options: Options) -> Result<Self, Error> {
        let servers = Servers::in_new_folder(options.keep || crate::keep())?;
        let [api_port, etcd_port, peer_port] = free_ports()?;
        let address = "127.0.0.1".to_string();
        let addrs = ListenAddrs {
            namespace: None,
            address,
            api_port,
            etcd_port,
            peer_port,
            local_port: api_port,
        };
        let this = Self::new(servers, addrs)?;
        this.start_servers(options)?;
        Ok(this)
    }

    /// Creates the certificates and files of a control plane without starting it.
    pub(crate) fn new(servers: Servers, addrs: ListenAddrs) -> Result<Self, Error> {
        let folder = servers.folder().to_path_buf();
        let authority = Authority::new(folder.join("pki"))?;
        issue_certificates(&authority, &addrs)?;
        let admin = folder.join("admin.kubeconfig");
        let local = format!("https://127.0.0.1:{}", addrs.local_port);
        authority.kubeconfig(&admin, &local, "admin")?;
        let policy = folder.join("audit-policy.yaml");
        std::fs::write(&policy, audit::POLICY).with_path(&policy)?;
        let client = Client::new(admin, folder.join("memory"))?;
        Ok(Self { client, folder, addrs, authority, servers: Mutex::new(servers) })
    }

    pub(crate) fn start_servers(&self, options: Options) -> Result<(), Error> {
        let etcd = self.etcd()?;
        self.servers().start("etcd", etcd)?;
        self.start_api()?;
        for (name, wanted) in [
            ("kube-controller-manager", options.controllers),
            ("kube-scheduler", options.scheduler),
        ] {
            if wanted {
                let kubeconfig = self.component_kubeconfig(name)?;
                let command = self.component(name, &kubeconfig)?;
                self.servers().start(name, command)?;
            }
        }
        if !options.controllers {
            return self.create_service_account("default");
        }
        // Wait for the controllers to create it: without it, no pod is admitted.
        wait_until("namespace default has a service account", || {
            self.servers().check("kube-controller-manager").map_err(|error| error.to_string())?;
            self.kubectl(&["get", "serviceaccount", "default"]).map_err(|error| error.to_string())
        })
        .map(drop)
    }

    /// Directory of the control plane.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Path of the CA certificate that signed the API server's certificate.
    pub fn ca(&self) -> PathBuf {
        self.authority.path("ca.crt")
    }

    /// Creates a namespace. Without controllers, also creates its service account `default`:
    /// otherwise no pod is admitted.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`] if the namespace already exists.
    pub fn make_namespace(&self, name: &str) -> Result<(), Error> {
        self.kubectl(&["create", "namespace", name])?;
        if !self.servers().has("kube-controller-manager") {
            return self.create_service_account(name);
        }
        wait_until("the namespace has a service account", || {
            self.kubectl(&["get", "serviceaccount", "default", "-n", name])
                .map_err(|error| error.to_string())
        })
        .map(drop)
    }

    fn create_service_account(&self, namespace: &str) -> Result<(), Error> {
        self.kubectl(&["create", "serviceaccount", "default", "-n", namespace]).map(drop)
    }

    /// Writes a kubeconfig of a service account, and returns its path.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`] if the account does not exist.
    pub fn kubeconfig_for(&self, namespace: &str, account: &str) -> Result<PathBuf, Error> {
        let token = self.token(namespace, account, None)?;
        let path = self.folder.join(format!("{namespace}.{account}.kubeconfig"));
        let server = format!("https://127.0.0.1:{}", self.addrs.local_port);
        self.authority.token_kubeconfig(&path, &server, &token)?;
        Ok(path)
    }

    /// Returns a [`Client`] with the identity of a service account.
    ///
    /// # Errors
    ///
    /// Same as [`ControlPlane::kubeconfig_for`].
    pub fn client_for(&self, namespace: &str, account: &str) -> Result<Client, Error> {
        let kubeconfig = self.kubeconfig_for(namespace, account)?;
        Client::new(kubeconfig, self.folder.join(format!("memory.{namespace}.{account}")))
    }

    /// Kills the API server. Its data stays in etcd.
    pub fn stop_api(&self) {
        self.servers().kill("kube-apiserver");
    }

    /// Starts the API server at its previous address, and waits until it is ready.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] if it is not ready within three minutes, with the last log lines of a
    /// server that exited.
    pub fn start_api(&self) -> Result<(), Error> {
        let command = self.api_server()?;
        self.servers().start("kube-apiserver", command)?;
        wait_until("the API server is ready", || {
            for name in ["etcd", "kube-apiserver"] {
                self.servers().check(name).map_err(|error| error.to_string())?;
            }
            // Connecting costs almost nothing; kubectl takes 100 ms of CPU time.
            std::net::TcpStream::connect(("127.0.0.1", self.addrs.local_port))
                .map_err(|error| error.to_string())?;
            self.kubectl(&["get", "--raw", "/readyz"]).map_err(|error| error.to_string())
        })
        .map(drop)
    }

    /// Path of the API server's audit log: one JSON object per line, level Metadata.
    pub fn audit_log(&self) -> PathBuf {
        self.folder.join("audit.log")
    }

    /// Requests in the audit log so far, oldest first.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the log cannot be read.
    pub fn requests(&self) -> Result<Vec<Request>, Error> {
        audit::read(&self.audit_log())
    }

    /// Path of a server's log: `kube-apiserver`, `etcd`, ...
    pub fn log(&self, server: &str) -> PathBuf {
        self.servers().log(server)
    }

    pub(crate) fn authority(&self) -> &Authority {
        &self.authority
    }

    pub(crate) fn servers(&self) -> MutexGuard<'_, Servers> {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a kubeconfig with which another server reaches the API server.
    pub(crate) fn component_kubeconfig(&self, name: &str) -> Result<PathBuf, Error> {
        let path = self.folder.join(format!("{name}.kubeconfig"));
        let ListenAddrs { address, api_port, .. } = &self.addrs;
        let url = format!("https://{}", with_port(address, *api_port));
        self.authority.kubeconfig(&path, &url, name)?;
        Ok(path)
    }

    fn etcd(&self) -> Result<Command, Error> {
        let ListenAddrs { etcd_port, peer_port, .. } = &self.addrs;
        let client = format!("http://127.0.0.1:{etcd_port}");
        let peer = format!("http://127.0.0.1:{peer_port}");
        let mut command = self.inside(programs::control_plane("etcd")?);
        command.args(["--name=test", "--unsafe-no-fsync", "--log-level=warn"]);
        command.arg(format!("--data-dir={}", self.folder.join("etcd").display()));
        for flag in ["listen-client-urls", "advertise-client-urls"] {
            command.arg(format!("--{flag}={client}"));
        }
        for flag in ["listen-peer-urls", "initial-advertise-peer-urls"] {
            command.arg(format!("--{flag}={peer}"));
        }
        command.arg(format!("--initial-cluster=test={peer}"));
        Ok(command)
    }

    fn api_server(&self) -> Result<Command, Error> {
        let ListenAddrs { address, api_port, etcd_port, namespace, .. } = &self.addrs;
        let file =
            |flag: &str, name: &str| format!("--{flag}={}", self.authority.path(name).display());
        let family = self.addrs.family();
        let mut command = self.inside(programs::control_plane("kube-apiserver")?);
        if namespace.is_some() {
            command.arg(format!("--bind-address={}", family.any));
            command.arg(format!("--advertise-address={address}"));
        } else {
            command.args(["--bind-address=127.0.0.1", "--endpoint-reconciler-type=none"]);
        }
        command.args([
            format!("--secure-port={api_port}"),
            format!("--etcd-servers=http://127.0.0.1:{etcd_port}"),
            format!("--service-cluster-ip-range={}", family.services),
            file("client-ca-file", "ca.crt"),
            file("tls-cert-file", "apiserver.crt"),
            file("tls-private-key-file", "apiserver.key"),
            file("kubelet-client-certificate", "kubelet-client.crt"),
            file("kubelet-client-key", "kubelet-client.key"),
            file("kubelet-certificate-authority", "ca.crt"),
            file("service-account-key-file", "sa.pub"),
            file("service-account-signing-key-file", "sa.key"),
            format!("--audit-policy-file={}", self.folder.join("audit-policy.yaml").display()),
            format!("--audit-log-path={}", self.audit_log().display()),
        ]);
        command.args([
            "--audit-log-maxsize=10000", // In MB; avoids rotation.
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            "--kubelet-preferred-address-types=InternalIP",
            "--authorization-mode=Node,RBAC",
            // The second plugin checks rights that owner references require. Some clusters enable
            // it.
            "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement",
            "--allow-privileged=true",
            // Evict pods of a dead node after 10 s instead of 5 minutes.
            "--default-not-ready-toleration-seconds=10",
            "--default-unreachable-toleration-seconds=10",
        ]);
        Ok(command)
    }

    fn component(&self, name: &str, kubeconfig: &Path) -> Result<Command, Error> {
        let mut command = self.inside(programs::built(name)?);
        command.arg(format!("--kubeconfig={}", kubeconfig.display()));
        command.args(["--secure-port=0", "--leader-elect=false"]);
        if name == "kube-controller-manager" {
            let file = |flag: &str, name: &str| {
                format!("--{flag}={}", self.authority.path(name).display())
            };
            command.args([
                file("service-account-private-key-file", "sa.key"),
                file("root-ca-file", "ca.crt"),
                "--use-service-account-credentials=true".to_string(),
                // Mark an unresponsive node as Unknown after 10 s instead of 50 s.
                "--node-monitor-period=1s".to_string(),
                "--node-monitor-grace-period=10s".to_string(),
            ]);
        }
        Ok(command)
    }

    fn inside(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        programs::inside(self.addrs.namespace.as_deref(), program)
    }
}

fn issue_certificates(authority: &Authority, addrs: &ListenAddrs) -> Result<(), Error> {
    let mut names: Vec<_> = ["", ".default", ".default.svc", ".default.svc.cluster.local"]
        .map(|suffix| format!("DNS:kubernetes{suffix}"))
        .into();
    names.push("DNS:localhost".to_string());
    let addresses = ["127.0.0.1", addrs.family().api_service, &addrs.address];
    names.extend(addresses.map(|address| format!("IP:{address}")));
    authority.issue("apiserver", "/CN=kube-apiserver", KeyUsage::Server, &names)?;
    for (name, subject) in [
        ("admin", "/O=system:masters/CN=admin"),
        ("kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client"),
        ("kube-controller-manager", "/CN=system:kube-controller-manager"),
        ("kube-scheduler", "/CN=system:kube-scheduler"),
        ("kube-proxy", "/CN=system:kube-proxy"),
        ("coredns", "/O=system:masters/CN=coredns"),
    ] {
        authority.issue(name, subject, KeyUsage::Client, &[])?;
    }
    Ok(())
}

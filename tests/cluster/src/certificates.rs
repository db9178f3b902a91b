//! A certificate authority, its certificates and kubeconfigs, created with openssl.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::error::{Error, WithPath, run};
use crate::programs::require;

/// A certificate authority in a directory, valid for a year: clusters live for minutes.
#[derive(Debug)]
pub(crate) struct Authority {
    folder: PathBuf,
}

/// Purpose of a certificate.
#[derive(Clone, Copy, Debug)]
pub(crate) enum KeyUsage {
    /// A client, identified by its subject.
    Client,
    /// A server, identified by its names.
    Server,
}

impl Authority {
    /// Creates the authority, and the key that signs service account tokens (`sa`).
    pub(crate) fn new(folder: PathBuf) -> Result<Self, Error> {
        require("openssl")?;
        std::fs::create_dir_all(&folder).with_path(&folder)?;
        let this = Self { folder };
        this.key("ca")?;
        this.openssl(&["req", "-x509", "-new", "-key", "ca.key", "-out", "ca.crt"], |command| {
            command.args(["-days", "365", "-subj", "/CN=test-cluster"]);
            command.args(["-addext", "keyUsage=critical,keyCertSign,cRLSign"]);
        })?;
        this.key("sa")?;
        this.openssl(&["ec", "-in", "sa.key", "-pubout", "-out", "sa.pub"], |_| ())?;
        Ok(this)
    }

    /// Creates `NAME.key` and `NAME.crt` for a subject such as `/O=system:masters/CN=admin`.
    /// `names` are subject alternative names such as `DNS:localhost` and `IP:127.0.0.1`.
    pub(crate) fn issue(
        &self,
        name: &str,
        subject: &str,
        usage: KeyUsage,
        names: &[String],
    ) -> Result<(), Error> {
        let usage = match usage {
            KeyUsage::Client => "clientAuth",
            KeyUsage::Server => "serverAuth",
        };
        let mut extensions =
            format!("keyUsage=critical,digitalSignature\nextendedKeyUsage={usage}\n");
        if !names.is_empty() {
            extensions += &format!("subjectAltName={}\n", names.join(","));
        }
        let file = self.path(&format!("{name}.ext"));
        std::fs::write(&file, extensions).with_path(&file)?;
        self.key(name)?;
        let request = format!("{name}.csr");
        self.openssl(&["req", "-new", "-subj", subject], |command| {
            command.args(["-key", &format!("{name}.key"), "-out", &request]);
        })?;
        self.openssl(&["x509", "-req", "-CA", "ca.crt", "-CAkey", "ca.key"], |command| {
            command.args(["-days", "365", "-in", &request, "-out", &format!("{name}.crt")]);
            // Without a serial file, openssl derives serial numbers from the time, and two may
            // collide.
            command.args(["-CAcreateserial", "-extfile", &format!("{name}.ext")]);
        })?;
        Ok(())
    }

    /// Writes a kubeconfig for a client with an issued certificate.
    pub(crate) fn kubeconfig(&self, to: &Path, server: &str, client: &str) -> Result<(), Error> {
        let user = json!({
            "client-certificate": self.path(&format!("{client}.crt")),
            "client-key": self.path(&format!("{client}.key")),
        });
        self.write_kubeconfig(to, server, user)
    }

    /// Writes a kubeconfig for a client with a token.
    pub(crate) fn token_kubeconfig(
        &self,
        to: &Path,
        server: &str,
        token: &str,
    ) -> Result<(), Error> {
        self.write_kubeconfig(to, server, json!({ "token": token }))
    }

    fn write_kubeconfig(
        &self,
        to: &Path,
        server: &str,
        user: serde_json::Value,
    ) -> Result<(), Error> {
        let ca = self.path("ca.crt");
        // JSON is valid YAML.
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{
                "name": "test",
                "cluster": { "server": server, "certificate-authority": ca },
            }],
            "users": [{ "name": "test", "user": user }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
            "current-context": "test",
        });
        std::fs::write(to, format!("{config:#}\n")).with_path(to)
    }

    /// Path of a file in the authority's directory, such as `ca.crt`.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn key(&self, name: &str) -> Result<(), Error> {
        let file = format!("{name}.key");
        self.openssl(&["ecparam", "-genkey", "-name", "prime256v1", "-noout"], |command| {
            command.args(["-out", &file]);
        })
    }

    fn openssl(&self, arguments: &[&str], more: impl FnOnce(&mut Command)) -> Result<(), Error> {
        let mut command = Command::new("openssl");
        command.args(arguments).current_dir(&self.folder);
        more(&mut command);
        run(&mut command).map(drop)
    }
}

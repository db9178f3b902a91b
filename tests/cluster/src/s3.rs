//! A real S3 server in the cluster's network.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Stdio;

use crate::error::{Error, WithPath, command_line};
use crate::network::{PLANE, family, with_port};
use crate::{ControlPlane, programs, wait_until};

pub(crate) const PORT: u16 = 8333;
const SERVER: &str = "s3";

/// An S3 server: endpoints for pods and for tests, and credentials.
#[derive(Clone, Debug)]
pub struct S3 {
    /// Endpoint URL for pods.
    pub endpoint: String,
    /// Endpoint URL for this process.
    pub local_endpoint: String,
    /// Name of an existing bucket.
    pub bucket: String,
    /// `AWS_ACCESS_KEY_ID`.
    pub access_key: String,
    /// `AWS_SECRET_ACCESS_KEY`.
    pub secret_key: String,
}

impl S3 {
    pub(crate) fn new(local_port: u16) -> Self {
        Self {
            endpoint: format!("http://{}", with_port(family().plane, PORT)),
            local_endpoint: format!("http://127.0.0.1:{local_port}"),
            bucket: "runs".to_string(),
            access_key: "stoker-test".to_string(),
            secret_key: "stoker-test-secret".to_string(),
        }
    }

    /// Starts the server, and creates the bucket unless it exists from an earlier run.
    pub(crate) fn start(&self, plane: &ControlPlane) -> Result<(), Error> {
        let folder = plane.folder().join("s3");
        std::fs::create_dir_all(&folder).with_path(&folder)?;
        let config = folder.join("s3.json");
        std::fs::write(&config, self.identities()).with_path(&config)?;
        let mut weed = programs::inside(Some(PLANE), programs::weed()?);
        weed.args(["server", "-s3", "-filer", "-volume.max=20"]);
        weed.arg(format!("-ip.bind={}", family().any));
        // The server waits for peers during an election, but has none.
        weed.args(["-master.electionTimeout=1s", "-master.telemetry=false"]);
        weed.arg(format!("-ip={}", family().plane)).arg(format!("-s3.port={PORT}"));
        weed.arg(format!("-dir={}", folder.display()));
        weed.arg(format!("-s3.config={}", config.display()));
        plane.servers().start(SERVER, weed)?;
        wait_until("the S3 server has its bucket", || {
            plane.servers().check(SERVER).map_err(|error| error.to_string())?;
            self.make_bucket(&folder)?;
            self.answers()
        })
    }

    pub(crate) fn stop(plane: &ControlPlane) {
        plane.servers().kill(SERVER);
    }

    /// Fails if the S3 endpoint does not respond. An error response is a success.
    fn answers(&self) -> Result<(), String> {
        let address = self.local_endpoint.trim_start_matches("http://");
        let mut answer = Vec::new();
        TcpStream::connect(address)
            .and_then(|mut stream| {
                stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
                stream.read_to_end(&mut answer)
            })
            .map_err(|error| error.to_string())?;
        if answer.is_empty() { Err(format!("{address} is closed")) } else { Ok(()) }
    }

    fn identities(&self) -> String {
        serde_json::json!({
            "identities": [{
                "name": "test",
                "credentials": [{ "accessKey": self.access_key, "secretKey": self.secret_key }],
                "actions": ["Admin", "Read", "Write", "List"],
            }],
        })
        .to_string()
    }

    /// Creates the bucket. Fails unless the server lists the bucket and a volume server's disk.
    fn make_bucket(&self, folder: &Path) -> Result<(), String> {
        let script = folder.join("commands");
        let commands =
            format!("s3.bucket.create -name {0}\ns3.bucket.list\nvolume.list\n", self.bucket);
        std::fs::write(&script, commands).map_err(|error| error.to_string())?;
        let weed = programs::weed().map_err(|error| error.to_string())?;
        let mut shell = programs::inside(Some(PLANE), weed);
        shell.args(["shell", &format!("-master={}", with_port(family().plane, 9333))]);
        shell.arg(format!("-filer={}", with_port(family().plane, 8888))).current_dir(folder);
        let input = std::fs::File::open(script).map_err(|error| error.to_string())?;
        let output = shell.stdin(input).stderr(Stdio::piped()).output();
        let output = output.map_err(|error| error.to_string())?;
        let listing = String::from_utf8_lossy(&output.stdout);
        let has = |word: &str| listing.contains(word);
        if has(" hdd(") && has(&self.bucket) {
            Ok(())
        } else {
            Err(format!("{}: {listing}", command_line(&shell)))
        }
    }
}

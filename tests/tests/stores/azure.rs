//! Azurite, Microsoft's emulator of Azure Blob Storage, on loopback.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use stoker_tests::{cache, describe_output};

/// Script that creates a container. Fails until Azurite responds.
const CREATE: &str = include_str!("container.js");

/// A running Azurite with one container. Dropping it ends the process.
pub(super) struct Azurite {
    process: Child,
    pub(super) port: u16,
}

impl Drop for Azurite {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Azurite {
    /// Starts Azurite with objects in memory and the log in `folder`.
    pub(super) fn start(folder: &Path, container: &str) -> Self {
        let package = cache().join("tools/azurite-3.35.0");
        let complete = package.join(".complete");
        assert!(complete.exists(), "{} is missing; run scripts/fetch-tools", package.display());
        let [port] = stoker_test_cluster::free_ports().unwrap_or_else(|error| panic!("{error}"));
        let log_path = folder.join("azurite.log");
        let log = std::fs::File::create(&log_path).unwrap();
        let process = Command::new("node")
            .arg(package.join("node_modules/azurite/dist/src/blob/main.js"))
            .args(["--blobHost", "127.0.0.1", "--blobPort", &port.to_string()])
            .args(["--inMemoryPersistence", "--silent", "--disableTelemetry"])
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let azurite = Self { process, port };
        let deadline = Instant::now() + stoker_test_cluster::PATIENCE;
        loop {
            let create =
                Command::new("node").args(["-e", CREATE, &port.to_string(), container]).output();
            let create = create.unwrap();
            if create.status.success() {
                return azurite;
            }
            let log = || std::fs::read_to_string(&log_path).unwrap_or_default();
            assert!(
                Instant::now() < deadline,
                "no Azurite: {}\n{}",
                describe_output(&create),
                log()
            );
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

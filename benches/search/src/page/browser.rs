//! Times and frames per second in a real browser: a Node script beside this package.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::json;

use super::{ID, Page};
use crate::BenchError;

/// Prints the figures. Without Node or Chromium on the path, prints what is missing.
pub(super) fn measure(page: &Page, packages: &Path) -> Result<(), BenchError> {
    let (Some(node), Some(chromium)) = (on_path("node"), on_path("chromium")) else {
        println!("left out: times in a browser, which need node and chromium on the path");
        return Ok(());
    };
    let input = json!({
        "url": page.url, "tools": packages, "chromium": chromium, "namespace": "bench", "id": ID,
    });
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("browser_side.mjs");
    let mut command = Command::new(node);
    command.arg(script).arg(input.to_string()).stdin(Stdio::null());
    match command.status()? {
        status if status.success() => Ok(()),
        status => Err(format!("browser_side.mjs failed: {status}").into()),
    }
}

fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|path| path.exists())
}

//! Version of the NVIDIA driver.

use cudarc::driver::sys::{CUDA_VERSION, cuDriverGetVersion};

use super::DriverVersion;
use crate::Result;
use crate::error::Infrastructure;

/// The version of CUDA whose functions `cudarc` binds to. Its feature in the workspace's
/// `Cargo.toml` selects it.
pub(super) const MIN: DriverVersion = DriverVersion(CUDA_VERSION as i32);

/// Returns the version of CUDA that the installed driver supports.
///
/// # Errors
///
/// Fails if the driver does not return its version.
// Reason: the driver has no safe function for this.
#[allow(unsafe_code)]
pub(super) fn version() -> Result<DriverVersion> {
    let mut version = 0;
    // SAFETY: the driver is loaded, because a GPU is visible. The call only writes `version`.
    let code = unsafe { cuDriverGetVersion(&raw mut version) };
    let text = |error| format!("cannot read the version of the NVIDIA driver: {error:?}");
    code.result().map_err(|error| Infrastructure(text(error)))?;
    Ok(DriverVersion(version))
}

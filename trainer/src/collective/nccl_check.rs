//! Checks that the ranks of a gang can train on GPUs.

use stoker_api::names::ENV_DEVICE;

use crate::error::Infrastructure;

/// Checks that all ranks loaded the same version of NCCL.
///
/// # Errors
///
/// Fails if NCCL is missing on a rank, or if versions differ.
pub(super) fn check_versions(versions: &[Result<i32, String>]) -> Result<(), crate::Error> {
    let first = versions.first();
    for (rank, version) in versions.iter().enumerate() {
        match (version, first) {
            (Err(why), _) => return Err(nccl_unavailable(&format!("rank {rank}: {why}"))),
            (Ok(version), Some(Ok(first))) if version != first => {
                let why = format!("rank 0 has version {first}, rank {rank} version {version}");
                return Err(nccl_unavailable(&why));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Builds the error for a gang on GPUs that cannot use NCCL. Falling back to all-reduce over TCP
/// would leave the GPUs idle most of the time.
pub(super) fn nccl_unavailable(why: &str) -> crate::Error {
    Infrastructure(format!(
        "cannot train on several GPUs without NCCL: {why}; install NCCL 2.14 or later \
         (libnccl.so.2) for every rank, or set {ENV_DEVICE}=cpu to train on CPUs"
    ))
    .into()
}

/// Builds the error for ranks that have NCCL, which could not connect them. `why` names the rank
/// and NCCL's reason.
pub(super) fn nccl_failed(why: &str) -> crate::Error {
    Infrastructure(format!(
        "NCCL cannot connect the ranks: {why}; set NCCL_DEBUG=WARN for details, or \
         {ENV_DEVICE}=cpu to train on CPUs"
    ))
    .into()
}

#[cfg(test)]
mod tests {
    use stoker_api::contract::ExitCode;

    use super::*;

    #[test]
    fn refusal_by_nccl_reports_its_reason() {
        let error = nccl_failed("rank 0: Duplicate GPU detected");
        let text = error.to_string();
        assert!(text.contains("rank 0: Duplicate GPU") && text.contains("NCCL_DEBUG=WARN"));
        assert!(!text.contains("install"), "{text}");
        assert_eq!(crate::error::exit_code(&*error), ExitCode::Infrastructure);
    }

    #[test]
    fn gpu_gangs_require_the_same_nccl() {
        let check = |versions: &[Result<i32, &str>], expected: Option<&str>| {
            let versions: Vec<_> =
                versions.iter().map(|version| version.map_err(str::to_owned)).collect();
            match (check_versions(&versions), expected) {
                (Ok(()), None) => {}
                (Err(error), Some(expected)) => {
                    let text = error.to_string();
                    assert!(text.contains(expected), "{text}");
                    assert!(text.contains("install NCCL") && text.contains("STOKER_DEVICE=cpu"));
                    assert_eq!(crate::error::exit_code(&*error), ExitCode::Infrastructure);
                }
                (result, expected) => panic!("{result:?}, not {expected:?}"),
            }
        };
        check(&[Ok(22_100), Ok(22_100)], None);
        check(&[Ok(22_100), Ok(21_800)], Some("rank 0 has version 22100, rank 1 version 21800"));
        check(&[Ok(22_100), Err("not found")], Some("rank 1: not found"));
        check(&[Err("not found"), Err("not found")], Some("rank 0: not found"));
    }
}

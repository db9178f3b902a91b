//! Programs that a file names.

use std::path::PathBuf;

use super::process;
use crate::failure::Failure;

/// Fails if `program`, the value of `field`, is not found.
///
/// # Errors
///
/// [`Failure::Input`].
pub(crate) fn require_program(field: &str, program: &str) -> Result<(), Failure> {
    if find_program(program).is_some() {
        return Ok(());
    }
    let why = match program.contains('/') {
        true => format!(
            "no such program in {}; build it, or run this command in the directory from which its \
             path begins",
            std::env::current_dir().unwrap_or_default().display()
        ),
        false => {
            "no such program next to `stoker` or on PATH; install it or write its path".to_owned()
        }
    };
    Err(Failure::Input(format!("{field} is `{program}`: {why}")))
}

/// Returns the executable file of `program`: a path, or a name next to `stoker` or on `PATH`.
pub(crate) fn find_program(program: &str) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt as _;
    let is_program = |path: &PathBuf| {
        path.metadata()
            .is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
    };
    if program.contains('/') {
        return Some(PathBuf::from(program)).filter(is_program);
    }
    let path = process::search_path(&std::env::current_exe().ok()?);
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(is_program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn find_program_searches_the_path() {
        assert!(find_program("sh").is_some());
        assert!(find_program("/bin/sh").is_some());
        assert!(find_program("no-such-program-at-all").is_none());
        assert!(find_program("/tmp").is_none());
    }
}

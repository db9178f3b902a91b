//! Sign-in, and the namespaces of a viewer.

use askama::Template;

use super::parts::Frame;

/// Form for a token.
#[derive(Debug, Template)]
#[template(path = "sign_in.html")]
pub(crate) struct SignInPage {
    pub(crate) frame: Frame,
    /// Path to go to afterwards.
    pub(crate) next: String,
    /// Why the sign-in failed.
    pub(crate) error: Option<String>,
}

/// Namespaces that the viewer sees.
#[derive(Debug, Template)]
#[template(path = "namespaces.html")]
pub(crate) struct NamespacesPage {
    pub(crate) frame: Frame,
    pub(crate) is_everywhere: bool,
    pub(crate) namespaces: Vec<NamespaceRow>,
    /// Why a namespace was not added.
    pub(crate) error: Option<String>,
}

/// A namespace.
#[derive(Debug)]
pub(crate) struct NamespaceRow {
    pub(crate) name: String,
    pub(crate) href: String,
    /// Missing permission; `None` if the namespace is shown.
    pub(crate) missing: Option<String>,
}

//! Web page of Stoker: experiments, trials, jobs, plots and logs.
//!
//! ```text
//!   source --> [store] --> [search] --> [build] --> [views] --> HTML (templates/)
//!                  |                 '-> [data] -----------------> JSON for plots
//!                  '--> storage --> [rows] --> [lttb] --> [curves] --^   [logs], [files]
//! ```
//!
//! - A source puts runs and jobs into a [`Store`]: `stoker ui` reads local records, or watches a
//!   cluster.
//! - Requests reach the store only through [`Visible`]: what their viewer may see.
//! - The page acts only through an [`ActionBackend`]: on a cluster with the viewer's permissions.
//! - Decisions and their reasons come from the engine; the page never derives them again.
//! - Scripts in `assets/` draw the plots. Everything else is HTML that works without scripts.

mod action_routes;
mod actions;
mod assets;
mod build;
mod bulk_routes;
mod connections;
mod curves;
mod data;
mod files;
mod filter;
#[cfg(test)]
mod fixture;
mod job;
mod job_routes;
mod live;
mod logs;
mod lttb;
mod respond;
mod router;
mod rows;
mod search;
mod security;
mod server;
mod sessions;
mod sign_in;
mod site;
mod slots;
mod state;
mod store;
mod text;
mod viewer;
mod views;
mod visible;

pub use self::actions::{Action, ActionAccess, ActionBackend, ClusterObjects, Permissions, Target};
pub use self::job::Job;
pub use self::router::{serve, serve_shared};
pub use self::security::Access;
pub use self::sessions::{Offer, SignIn};
pub use self::site::{Site, SiteViewer, quoted};
pub use self::store::{Changes, Run, Standing, Store, Unreadable};
pub use self::text::bytes;
pub use self::viewer::{Account, Directory, Refusal, Sight, Token};
pub use self::visible::{Part, Visible};
